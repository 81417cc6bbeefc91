"""Bytes that a configuration needs on one device, from the sizes that the model group states.

Both sides are counted as resident at the same time: a rollout rank and a trainer rank that share a device.
"""

from flexfloor.config.schema import Dtype, ModelConfig, RolloutConfig, TrainConfig, TrainerConfig
from flexfloor.model_memory import RankMemory, max_experts_per_rank, rank_memory

USABLE_SHARE = 0.9
"""The rest of a device is left to activations, collectives' buffers and the runtime itself."""

_GRADIENT_BYTES = 4
_ADAM_BYTES = {Dtype.float32: 8, Dtype.bfloat16: 12}
"""Two fp32 moments a parameter; bf16 training keeps fp32 weights besides."""


def rollout_memory(model: ModelConfig, rollout: RolloutConfig, num_ranks: int) -> RankMemory:
    """Of one of `num_ranks` that serve. The KV pool of a rank has the same size whoever serves; where the
    engine sizes it itself, it must hold at least one longest sequence.
    """
    return rank_memory(
        model,
        num_expert_slots=max_experts_per_rank(model.num_experts, num_ranks),
        kv_tokens=rollout.kv_cache_tokens or rollout.max_sequence_tokens,
    )


def trainer_bytes(config: TrainConfig) -> int:
    """Weights, fp32 gradients, Adam and, with a KL penalty, the reference weights of one trainer rank."""
    model, trainer = config.model, config.trainer
    item_bytes = model.dtype.num_bytes
    dense = model.dense_bytes // item_bytes // (trainer.tp_size * trainer.pp_size)
    experts = model.num_experts * model.num_layers * model.expert_bytes // item_bytes
    experts //= trainer.ep_size * trainer.expert_tp_size * trainer.pp_size
    num_weight_copies = 2 if config.algorithm.kl_coef > 0 else 1
    resident = (dense + experts) * (num_weight_copies * item_bytes + _GRADIENT_BYTES)
    return resident + _adam_bytes(trainer, model.dtype, dense, experts)


def _adam_bytes(trainer: TrainerConfig, dtype: Dtype, dense: int, experts: int) -> int:
    if trainer.optimizer_offload:
        return 0
    if trainer.distributed_optimizer:
        dense, experts = dense // trainer.dp_size, experts // trainer.expert_dp_size
    return (dense + experts) * _ADAM_BYTES[dtype]


def shares_devices(config: TrainConfig) -> bool:
    """Whether some device holds a rollout rank and a trainer rank."""
    return config.rollout.ep_size + config.trainer.num_ranks > config.cluster.num_devices
