"""Why a request cannot be met. PURE; reads the membership and changes nothing."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flexfloor.membership.events import Leave
from flexfloor.membership.ranks import Rank, RankState

if TYPE_CHECKING:
    from flexfloor.membership.state import Membership


def release_refusal(membership: "Membership", ep_ranks: tuple[int, ...], leave: Leave) -> str:
    """Empty: it can be met."""
    reason = _unusable(membership, ep_ranks)
    if not ep_ranks:
        reason = "no ep_rank is named"
    elif membership.recovery is not None:
        reason = f"ask again when the recovery in flight is over: {membership.recovery}"
    for ep_rank in ep_ranks if not reason else ():
        reason = reason or _release_refusal_of(membership, membership.ranks[ep_rank], leave)
    return reason or _floor_refusal(membership, ep_ranks)


def rejoin_refusal(membership: "Membership", ep_ranks: tuple[int, ...]) -> str:
    """Empty: it can be met."""
    reason = _unusable(membership, ep_ranks)
    for ep_rank in ep_ranks if not reason else ():
        rank = membership.ranks[ep_rank]
        if rank.state in (RankState.exited, RankState.lost):
            return f"ep_rank {ep_rank} is {rank.state}: its process is gone"
        reason = reason or stale_weights(membership, (rank,))
    return reason


def stale_weights(membership: "Membership", ranks: Iterable[Rank]) -> str:
    """Which of the parked ranks missed a weight update. Empty: none did."""
    now = membership.weight_version
    stale = [rank for rank in ranks if rank.state is RankState.parked and rank.weight_version != now]
    return "; ".join(
        f"ep_rank {rank.ep_rank} holds weight_version {rank.weight_version}, the members hold {now}"
        for rank in stale
    )


def _unusable(membership: "Membership", ep_ranks: tuple[int, ...]) -> str:
    unknown = [rank for rank in ep_ranks if not 0 <= rank < membership.ep_size]
    if unknown:
        return f"ep_rank {unknown[0]} does not exist: the ranks are 0 to {membership.ep_size - 1}"
    starting = [rank.ep_rank for rank in membership.ranks if rank.state is RankState.starting]
    return f"ep_ranks {starting} have not joined yet" if starting else ""


def _release_refusal_of(membership: "Membership", rank: Rank, leave: Leave) -> str:
    is_joiner = membership.change is not None and rank.ep_rank in membership.change.joiners
    is_awaited = is_joiner or rank.is_wanted or (rank.is_woken and rank.state is RankState.parked)
    if rank.state is RankState.lost:
        return f"ep_rank {rank.ep_rank} is lost: its process is gone"
    if is_awaited:
        return f"ep_rank {rank.ep_rank} is about to rejoin"
    if rank.state is RankState.parked and leave is Leave.exit:
        return f"ep_rank {rank.ep_rank} is parked: it can exit from the group only, so let it rejoin first"
    if rank.state is RankState.draining and rank.leave is not leave:
        return f"ep_rank {rank.ep_rank} is draining in order to {rank.leave}, not to {leave}"
    return ""


def _floor_refusal(membership: "Membership", ep_ranks: tuple[int, ...]) -> str:
    """Ranks that drain already have left as far as the floor goes; those that may come back have not come."""
    routed = membership.routed
    num_left = len(set(routed) - set(ep_ranks))
    if num_left >= membership.floor:
        return ""
    return (
        f"releasing ep_ranks {sorted(set(ep_ranks))} would leave {num_left} of the {len(routed)} ranks that "
        f"take requests, and the floor is {membership.floor}"
    )
