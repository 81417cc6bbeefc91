"""The membership as JSON, the choice of ranks by number, and what happened between two statuses. PURE."""

from collections.abc import Iterator, Mapping
from typing import Any

from flexfloor.membership.status import MembershipStatus, RecoveryRecord, SwitchRecord

Event = dict[str, Any]


def membership_json(status: MembershipStatus, *, mode: str, release: str, clock_zero_s: float) -> Event:
    """`clock_zero_s`: unix time at which the manager's clock was 0."""
    return {
        "mode": mode,
        "membership_epoch": status.membership_epoch,
        "members": list(status.members),
        "routed": list(status.routed),
        "states": {str(rank): state for rank, state in sorted(status.states.items())},
        "nodes": {str(rank): node for rank, node in sorted(status.nodes.items())},
        "weight_versions": {str(rank): version for rank, version in sorted(status.weight_versions.items())},
        "floor": status.floor,
        "experts_per_rank": {str(rank): count for rank, count in sorted(status.experts_per_rank.items())},
        "last_switches": [_switch_json(switch, clock_zero_s) for switch in status.last_switches],
        "lost": list(status.lost),
        "recoveries": [_recovery_json(recovery) for recovery in status.recoveries],
        "recovering": status.recovering,
        "change": status.change,
        "num_fences": status.num_fences,
        "failed": status.failed,
        "release": release,
    }


def events_between(before: MembershipStatus, after: MembershipStatus) -> Iterator[Event]:
    """What a stream of events says of the step from one status to the next, without numbers and times."""
    epoch = after.membership_epoch
    if after.last_switches != before.last_switches:
        switch = _switch_json(after.last_switches[-1], 0.0)
        del switch["at"]
        yield {"type": "switch", **switch}
    if after.recoveries != before.recoveries:
        yield {"type": "recovery", **_recovery_json(after.recoveries[-1])}
    for rank, state in sorted(after.states.items()):
        if before.states[rank] != state:
            change = {"from": before.states[rank], "to": state}
            yield {"type": "state", "membership_epoch": epoch, "ep_rank": rank, **change}
    if after.failed is not None and before.failed is None:
        yield {"type": "failed", "membership_epoch": epoch, "reason": after.failed}


def choose_leavers(num_ranks: int, status: MembershipStatus, load: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks with fewest requests, the last one first among equals; all of them where there are too few,
    so that the manager's refusal names the floor."""
    ordered = sorted(status.routed, key=lambda rank: (load.get(rank, 0), -rank))
    return tuple(sorted(ordered[:num_ranks]))


def choose_returners(num_ranks: int, status: MembershipStatus) -> tuple[int, ...]:
    """The first of those that are away. Raises ValueError where there are too few."""
    away = [rank for rank, state in sorted(status.states.items()) if state in ("parked", "draining")]
    if num_ranks > len(away):
        raise ValueError(f"num_ranks={num_ranks}: {len(away)} ranks are parked or on their way there")
    return tuple(away[:num_ranks])


def changed_at(status: MembershipStatus) -> float:
    """Manager's clock, seconds, when the epoch in force began: by a switch, or by a recovery."""
    times = {switch.membership_epoch: switch.at for switch in status.last_switches}
    times |= {recovery.membership_epoch: recovery.recovered_at for recovery in status.recoveries}
    return times.get(status.membership_epoch, max(times.values(), default=0.0))


def _recovery_json(recovery: RecoveryRecord) -> Event:
    return {
        "generation": recovery.generation,
        "membership_epoch": recovery.membership_epoch,
        "lost": list(recovery.lost),
        "members": list(recovery.members),
        "recovery_s": recovery.recovery_s,
        "num_bytes": recovery.num_bytes,
    }


def _switch_json(switch: SwitchRecord, clock_zero_s: float) -> Event:
    return {
        "membership_epoch": switch.membership_epoch,
        "members": list(switch.members),
        "stall_s": switch.stall_s,
        "num_bytes": switch.num_bytes,
        "at": clock_zero_s + switch.at,
    }
