"""Typed configuration: one dataclass per Hydra group, one home per default.

Hydra composes YAML over these schemas; `flexfloor.cli` turns the result into these dataclasses, and nothing
below `cli` sees a DictConfig. Treat the objects as read-only. A field's docstring stands under the field.
"""

from flexfloor.config.schema import (
    AlgorithmConfig,
    ClusterConfig,
    DataConfig,
    LoggingConfig,
    MembershipConfig,
    ModelConfig,
    ReleaseConfig,
    RolloutConfig,
    SchedulingConfig,
    TrainConfig,
    TrainerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ClusterConfig",
    "DataConfig",
    "LoggingConfig",
    "MembershipConfig",
    "ModelConfig",
    "ReleaseConfig",
    "RolloutConfig",
    "SchedulingConfig",
    "TrainConfig",
    "TrainerConfig",
]
