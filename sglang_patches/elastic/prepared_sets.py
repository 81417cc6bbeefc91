"""Makes the communicators and CUDA graphs of the short list of member sets, when a rank starts."""

from typing import Any

from sglang_patches.elastic.graphs import GraphSets
from sglang_patches.elastic.groups import GroupFactory, barrier, restamp
from sglang_patches.member_sets import MemberSets

_AT_START = 0
"""membership_epoch in the names of groups that no change has asked for yet."""


def prepare_sets(
    scheduler: Any, ep_rank: int, sets: MemberSets, groups: GroupFactory, graphs: GraphSets
) -> None:
    """Collective over all ranks, with the same sets in the same order. Leaves the full group in force."""
    own = [members for members in sets if ep_rank in members]
    for members in own:
        groups.coordinator(members, _AT_START)
    if not graphs.has_decode_graphs:
        return
    full = scheduler.tp_group
    for members in sets:
        # Capturing takes longer than a member of the next set may wait for its peers in a group of ours.
        barrier(full)
        if members in own:
            restamp(scheduler, groups.coordinator(members, _AT_START))
            graphs.capture(members)
            restamp(scheduler, full)
