"""What a key may choose from. Members are lower case: OmegaConf matches the member's name."""

from enum import StrEnum


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Dtype.float32 else 2


class ModelSource(StrEnum):
    hf = "hf"
    """A Hugging Face checkpoint folder on disk."""
    tiny = "tiny"
    """A tiny Qwen3-MoE that is created and warmed up by this run, then cached."""


class Collectives(StrEnum):
    gloo = "gloo"
    shm = "shm"
    """Shared memory within one host; CPU only."""
    nccl = "nccl"


class MembershipMode(StrEnum):
    static = "static"
    """Every rank serves to the end of the step."""
    elastic = "elastic"
    """Ranks leave during the rollout and are back for the next step."""


class ReleaseUse(StrEnum):
    """What becomes of a worker that has left the EP group."""

    park = "park"
    """Its process waits and holds what `membership.park_frees` leaves it; the reversible default."""
    exit = "exit"
    """Its process ends: in the last step, or in every step of a run that restarts its own server."""
    command = "command"
    """It parks, and a command of yours runs until the ranks are called back."""
    slurm = "slurm"
    """In the last step it exits, and a node whose ranks have all exited leaves the SLURM job for good."""


class ExpertSlots(StrEnum):
    exact = "exact"
    """Room for experts taken over is made beside the old tensors, and the switch swaps them."""
    reserved = "reserved"
    """Every rank keeps ceil(experts / floor) slots per layer from the start: addresses never change."""


class Placement(StrEnum):
    round_robin = "round_robin"
    """verl's baseline inside one EP group: arrival order over the ranks, whatever the lengths."""
    least_inflight = "least_inflight"
    """The rank with the fewest unfinished responses, in arrival order."""
    chunked = "chunked"
    """Equal contiguous chunks of the request order."""
    balanced = "balanced"
    """Even counts and like work on every rank, by predicted length, longest first."""
    tiers = "tiers"
    """Long ones together on ranks that stay to the end, or balanced where the throughput guard forbids it."""


class Batching(StrEnum):
    fifo = "fifo"
    """Data order."""
    length_bucketed = "length_bucketed"
    """Prompts of like predicted length, out of a window of a few steps, make a rollout step."""


class StartingSize(StrEnum):
    full = "full"
    """Every rank serves from the start of a step."""
    auto = "auto"
    """As many as the step's predicted work pays for, within the throughput guard."""


class ReleaseRule(StrEnum):
    """Which ranks leave the group during a step, and what wall time may be paid for it."""

    drained = "drained"
    """A rank leaves when it has no response left, if what is saved outweighs the switch; nothing moves."""
    guarded = "guarded"
    """Drained ranks leave; responses move where that costs next to no wall time."""
    eager = "eager"
    """As `guarded` at a lower price of wall time and a wider budget."""
    max = "max"
    """Worker time first: wall time has its price, but no budget."""


class ClockName(StrEnum):
    """What the cost model takes an iteration to cost."""

    auto = "auto"
    """The cluster's GPU; `neutral` on CPU."""
    neutral = "neutral"
    """Every iteration costs the same, whatever the group and its load."""
    h100 = "h100"
    h200 = "h200"
    h20 = "h20"


class DataSource(StrEnum):
    jsonl = "jsonl"
    parquet = "parquet"
    hf_disk = "hf_disk"
    reasoning_gym = "reasoning_gym"
    arithmetic = "arithmetic"


class LossAgg(StrEnum):
    sequence_mean = "sequence_mean"
    """Mean over tokens inside each response, then mean over responses."""
    fixed = "fixed"
    """Sum over tokens divided by (number of responses x `rollout.max_response_tokens`)."""
    token_mean = "token_mean"
    """Mean over all tokens of the step: long responses dominate."""


class AdvantageNorm(StrEnum):
    group_std = "group_std"
    """(reward - group mean) / (group standard deviation + 1e-6)."""
    group_mean = "group_mean"
    """reward - group mean."""


class WeightSyncPath(StrEnum):
    distributed = "distributed"
    """Broadcast flattened buckets from trainer rank 0 over a process group shared with every engine rank."""
    tensor = "tensor"
    """Flattened buckets handed over by shared memory (CPU) or CUDA IPC: trainer and engine share a host."""
    disk = "disk"
    """A Hugging Face checkpoint in the run directory that the engine reloads."""
