"""What `flexfloor-simulate` reads."""

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from flexfloor.config.checks import at_least, complete, require
from flexfloor.config.choices import ClockName, Device
from flexfloor.config.memory import USABLE_SHARE
from flexfloor.config.schema import MAX_SEED, ClusterConfig, ModelConfig


class TraceSource(StrEnum):
    """Where response lengths come from."""

    regime = "regime"
    """Generated, like one of the studied workloads."""
    jsonl = "jsonl"
    """Files of lengths, a JSON object a line: `prompt_id` with `lengths` or `num_tokens`."""
    verl = "verl"
    """verl's rollout dumps."""
    slime = "slime"
    """slime's rollout dumps."""
    run = "run"
    """Run directories of flexfloor-train: their ledgers."""


@dataclass(kw_only=True)
class TraceConfig:
    """The response lengths to schedule."""

    source: TraceSource = TraceSource.regime
    """Where response lengths come from."""
    regime: str = "A"
    """Name of the workload (`source=regime`)."""
    prompt_share: float | None = None
    """Of the variance of ln(length), the part between prompts; null = 0.55 (`source=regime`)."""
    num_steps: int = 8
    """Rollout steps in a pass over the prompts (`source=regime`)."""
    num_passes: int = 2
    """Counted passes; one more teaches the predictor (`source=regime`)."""
    paths: list[str] = field(default_factory=list)
    """Files or folders of the other sources."""
    cap_tokens: int | None = None
    """Most tokens of a response; null = what the files say, else the longest response."""
    num_prompts_per_step: int | None = None
    """Prompts of a rollout step; null = the regime's, or 32."""
    warm: bool = True
    """Schedule with a history: of the trace's first passes, or of one drawn like the only one there is."""

    def __post_init__(self) -> None:
        complete(self, "trace")
        at_least(self, "trace", 1, "num_steps", "num_passes", "cap_tokens", "num_prompts_per_step")
        is_share = self.prompt_share is None or 0 <= self.prompt_share < 1
        fix = "set trace.prompt_share in [0, 1)"
        require(is_share, "trace.prompt_share", self.prompt_share, "is no share of a variance", fix)
        needs = self.source is not TraceSource.regime
        fix = f"set trace.paths=[...] for trace.source={self.source}, and for no regime"
        problem = "names no files" if needs else "a regime is generated"
        require(needs == bool(self.paths), "trace.paths", self.paths, problem, fix)


@dataclass(kw_only=True)
class SimulateConfig:
    """Lengths, a machine, and how its time is priced."""

    cluster: ClusterConfig = MISSING
    model: ModelConfig = MISSING
    trace: TraceConfig = field(default_factory=TraceConfig)
    num_ranks: int | None = None
    """Ranks of the full EP group; null = the regime's, or all devices of the cluster."""
    floor: int | None = None
    """Fewest ranks that may serve; null = a quarter of them, or more where memory asks for it."""
    running_limit_per_rank: int = 256
    """Responses that a rank decodes at once, in every group size."""
    clock: ClockName = ClockName.auto
    """Prices iterations, always of Qwen3-30B-A3B; auto = the cluster's GPU, `neutral` on CPU."""
    model_tokens_per_token: int = 1
    """One token of the trace stands for so many of the model that the clock prices."""
    window_steps: int = 4
    """As `scheduling.window_steps`."""
    decision_interval_iterations: int | None = None
    """null = 16, on more than 32 ranks 64."""
    price: float = 3.0
    """What a second of wall time of the whole group is worth, when sizes of the group are compared."""
    usable_share: float = USABLE_SHARE
    """Share of a device's memory that weights and KV cache may take."""
    other_bytes: int = 0
    """What else lies on a device, e.g. a trainer rank."""
    seed: int = 0
    """Of generated lengths and of the order of buckets."""
    picture: str | None = "simulate.svg"
    """File for the picture; null draws none."""

    def __post_init__(self) -> None:
        complete(self, "")
        for name in ("num_ranks", "floor", "running_limit_per_rank", "model_tokens_per_token"):
            self._at_least(name, 1)
        for name in ("window_steps", "decision_interval_iterations"):
            self._at_least(name, 1)
        for name in ("price", "other_bytes"):
            self._at_least(name, 0)
        in_range = 0 < self.usable_share <= 1
        fix = "set usable_share above 0, at most 1"
        require(in_range, "usable_share", self.usable_share, "is no share", fix)
        require(0 <= self.seed < MAX_SEED, "seed", self.seed, "must fit in 31 bits", "set seed=0 or another")

    def _at_least(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        holds = value is None or value >= minimum
        require(holds, name, value, f"must be at least {minimum}", f"set {name} to {minimum} or more")

    @property
    def clock_name(self) -> str:
        """`auto` follows the cluster's name, as presets are named after their GPU."""
        if self.clock is not ClockName.auto:
            return str(self.clock)
        if self.cluster.device is Device.cpu:
            return "neutral"
        kinds = [kind for kind in ("h100", "h200", "h20") if self.cluster.name.endswith(kind)]
        return kinds[0] if kinds else "h200"
