"""What can be seen of a membership from outside: frozen, and JSON-able as it is. PURE."""

from dataclasses import dataclass, field

from flexfloor.membership.events import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """How a release or a rejoin ended."""

    operation_id: str
    ok: bool
    reason: str
    """Why not; empty when ok."""
    membership_epoch: int
    """In force when it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRecord:
    """A change that took place."""

    membership_epoch: int
    members: tuple[int, ...]
    stall_s: float
    """Longest over the ranks that stayed."""
    num_bytes: int
    """Expert weights received, summed over ranks."""
    at: float
    """Manager's clock, seconds, when the last rank had reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """A recovery that is over."""

    generation: int
    membership_epoch: int
    lost: tuple[int, ...]
    """Ranks lost since the group was last whole. Empty: it broke, and nobody was found dead."""
    members: tuple[int, ...]
    detected_at: float
    """Manager's clock, seconds, when the last of them was known to be lost."""
    recovered_at: float
    """The same, when the last rank had reported."""
    recovery_s: float
    num_bytes: int
    """Expert weights restored, summed over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipStatus:
    membership_epoch: int
    members: tuple[int, ...]
    routed: tuple[int, ...]
    """Members that take new requests."""
    states: dict[int, str]
    """ep_rank -> RankState."""
    weight_versions: dict[int, WeightVersion | None]
    floor: int
    experts_per_rank: dict[int, int]
    """Members only."""
    last_switches: tuple[SwitchRecord, ...]
    """Oldest first."""
    change: str | None
    """The change in flight, in words."""
    num_fences: int
    """Held and waiting."""
    failed: str | None
    """Why the group cannot go on."""
    nodes: dict[int, str] = field(default_factory=dict)
    """ep_rank -> the machine it runs on, for ranks that have joined."""
    last_counters: dict[int, dict[str, int]] = field(default_factory=dict)
    """Iteration counters of ranks that have exited, as of their end."""
    lost: tuple[int, ...] = ()
    recoveries: tuple[RecoveryRecord, ...] = ()
    """Oldest first, the last 20."""
    recovering: str | None = None
    """The recovery in flight, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFigures:
    """What a rollout step cost that a driver marked over HTTP; the server's reply to its end."""

    wall_s: float
    """From the answer to `begin` to the request `end`."""
    occupied_worker_s: float
    """Sum over ranks of the time in the group."""
    static_occupied_worker_s: float
    """The same if nobody had left."""
    response_tokens: int
    worker_iterations: int | None
    """None where nobody can tell the count of a rank."""
    static_worker_iterations: int | None
    """Every rank in each iteration of the rank that had most."""
    num_releases: int
    """Ranks that left, each time counted."""
    membership_epoch: int
