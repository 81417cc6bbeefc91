"""What `flexfloor-serve` tells the plugin in each process of the server: one JSON file."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sglang_patches.elastic.delays import DelayConfig
from sglang_patches.member_sets import MemberSets

COLLECTIVES = ("gloo", "shm")
MEMBERSHIPS = ("static", "elastic")
EXPERT_SLOTS = ("exact", "reserved")
PARK_FREES = ("experts", "kv", "dense")
RELEASES = ("manual", "drained", "policy")
RECOVERIES = ("auto", "on", "off")
RETRIES = ("auto", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """The plugin's configuration, the same in every process of one server."""

    device: str
    """Value of SGLang's `--device`; rows for the CPU are active only when it is `cpu`."""
    collectives: str = "gloo"
    """`gloo` or `shm`: what carries the collectives of the EP group. `shm` works on one host's CPUs only."""
    left_out: tuple[str, ...] = ()
    """Targets of catalog rows not to install, to measure what a row is worth. For benchmarks only."""
    iteration_log: str = ""
    """Folder in which each rank logs its iterations; empty: no log."""

    membership: str = "static"
    """`elastic`: ranks may leave the EP group and return; the rows of elastic membership are active."""
    floor: int = 1
    """Fewest ranks that may serve."""
    folder: str = ""
    """Folder of the manager's socket and token, only for this user. Set with `membership=elastic`."""
    release: str = "manual"
    """Who decides when ranks leave: `manual`: a driver. `drained`, `policy`: the server, as it sees fit."""
    release_quiet_s: float = 0.1
    """How long no request may have arrived before the server lets drained ranks go."""
    clock: str = "neutral"
    """Cost model of `release=policy`."""
    expert_slots: str = "exact"
    """`reserved`: every rank keeps ceil(experts / floor) slots per layer from the start."""
    park_frees: tuple[str, ...] = ("experts", "kv")
    """What a parked rank gives back: of `experts`, `kv`, `dense`."""
    member_sets: MemberSets = ()
    """Sets besides the full one whose communicators and CUDA graphs are made at the start."""
    prepare_timeout_s: float = 120.0
    """A change that is not prepared by then is cancelled."""
    recovery: str = "auto"
    """Whether the others go on when a rank is lost. `auto`: where safe; `on`: refuse the start where not."""
    retry: str = "auto"
    """What follows a broken pass. `auto`: it is made again where the model allows it, else as with `prefill`:
    its requests are prefilled again."""
    heartbeat_timeout_s: float = 60.0
    """A rank that is silent for so long is ended, and then lost."""
    fault_folder: str = ""
    """Where files end or stop a rank at a point, see `elastic.fault_points`. For tests only."""
    delays: DelayConfig = field(default_factory=DelayConfig)
    """Random delays in the ranks. For tests only."""

    def __post_init__(self) -> None:
        for name, known in (
            ("collectives", COLLECTIVES),
            ("membership", MEMBERSHIPS),
            ("expert_slots", EXPERT_SLOTS),
            ("release", RELEASES),
            ("recovery", RECOVERIES),
            ("retry", RETRIES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r}, must be one of {', '.join(known)}")
        unknown = set(self.park_frees) - set(PARK_FREES)
        if unknown:
            raise ValueError(f"park_frees={','.join(self.park_frees)}, may hold {', '.join(PARK_FREES)}")
        if self.floor < 1:
            raise ValueError(f"floor={self.floor}, must be 1 or more")

    @property
    def recovers(self) -> bool:
        """Whether a lost rank is to be survived, as far as the command line says."""
        return self.membership == "elastic" and self.recovery != "off"

    def num_reserved_slots(self, num_experts: int) -> int:
        """Slots per layer that a rank keeps from the start; 0 with exact slots."""
        return math.ceil(num_experts / self.floor) if self.expert_slots == "reserved" else 0


def read(path: str) -> PluginConfig:
    """Read and check the file. Raises ValueError naming the file and what is wrong with it."""
    try:
        raw = json.loads(Path(path).read_text(encoding="ascii"))
        if not isinstance(raw, dict):
            raise ValueError("it is not a mapping")
        for name in ("left_out", "park_frees"):
            if name in raw:
                raw[name] = tuple(raw[name])
        if "member_sets" in raw:
            raw["member_sets"] = tuple(tuple(members) for members in raw["member_sets"])
        if "delays" in raw:
            raw["delays"] = DelayConfig(**raw["delays"])
        return PluginConfig(**raw)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"plugin configuration {path} cannot be used: {error}") from error


def dump(config: PluginConfig) -> str:
    """The file's text."""
    return json.dumps(asdict(config))
