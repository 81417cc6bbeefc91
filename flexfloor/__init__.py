"""FlexFloor: synchronous RL post-training of MoE models on an elastic expert-parallel rollout group."""

__version__ = "0.1.0"
