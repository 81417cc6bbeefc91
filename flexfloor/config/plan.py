"""What `flexfloor-plan` reads."""

from dataclasses import dataclass

from omegaconf import MISSING

from flexfloor.config.checks import complete, divides, require
from flexfloor.config.choices import ModelSource
from flexfloor.config.hf_checkpoint import check_hf_checkpoint
from flexfloor.config.memory import USABLE_SHARE
from flexfloor.config.schema import ClusterConfig, ModelConfig

NO_CHECKPOINT = "none"
"""`model.path` of a plan that compares its sizes with no checkpoint."""


@dataclass(kw_only=True)
class PlanConfig:
    """Sizes of a model and of a machine, and what must be in memory at once."""

    cluster: ClusterConfig = MISSING
    model: ModelConfig = MISSING
    num_ranks: int | None = None
    """Ranks of the full EP group; null = all devices of the cluster."""
    usable_share: float = USABLE_SHARE
    """Share of a device's memory that weights and KV cache may take."""
    other_bytes: int = 0
    """What else lies on a device, e.g. a trainer rank."""
    longest_tokens: int | None = None
    """Prompt and response of the longest sequence; null = model.context_tokens."""
    tail_tokens: int = 0
    """KV tokens of all sequences together that are in flight when the group is smallest."""
    slot_floor: int | None = None
    """Reserve the expert slots of so small a group from the start; null = of the least that fits."""

    def __post_init__(self) -> None:
        complete(self, "")
        for name, minimum in (("other_bytes", 0), ("tail_tokens", 0), ("longest_tokens", 1)):
            value = getattr(self, name)
            fix = f"set {name} to {minimum} or more"
            require(value is None or value >= minimum, name, value, f"must be at least {minimum}", fix)
        share = self.usable_share
        require(
            0 < share <= 1, "usable_share", share, "must be above 0 and at most 1", "set usable_share=0.9"
        )

    @property
    def ep_size(self) -> int:
        return self.cluster.num_devices if self.num_ranks is None else self.num_ranks

    @property
    def longest_sequence_tokens(self) -> int:
        return self.model.context_tokens if self.longest_tokens is None else self.longest_tokens


def validate_plan(config: PlanConfig) -> None:
    """Rules across groups, and the checkpoint where one is named."""
    ep_size, devices = config.ep_size, config.cluster.num_devices
    why = "every rank of the full group holds the same number of experts"
    divides("num_ranks", ep_size, "model.num_experts", config.model.num_experts, why)
    fix = f"set num_ranks to at most {devices}, or choose a larger cluster"
    require(ep_size <= devices, "num_ranks", ep_size, f"more ranks than the {devices} devices", fix)
    floor, fix = config.slot_floor, f"set slot_floor to 1 .. {ep_size}, or null"
    is_size = floor is None or 1 <= floor <= ep_size
    require(is_size, "slot_floor", floor, f"the group has 1 to {ep_size} ranks", fix)
    context, longest = config.model.context_tokens, config.longest_sequence_tokens
    fix = f"set longest_tokens to at most {context}"
    require(longest <= context, "longest_tokens", longest, f"model.context_tokens={context}", fix)
    if config.model.source is ModelSource.hf and config.model.path != NO_CHECKPOINT:
        check_hf_checkpoint(config.model)
