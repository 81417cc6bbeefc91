"""The membership as JSON, ranks by number, and what happened between two statuses."""

import json
from dataclasses import replace

import pytest

from flexfloor.membership.status import MembershipStatus, SwitchRecord
from sglang_patches.http.view import choose_leavers, choose_returners, events_between, membership_json

FULL = MembershipStatus(
    membership_epoch=0,
    members=(0, 1, 2),
    routed=(0, 1, 2),
    states=dict.fromkeys(range(3), "serving"),
    weight_versions=dict.fromkeys(range(3), "7"),
    floor=1,
    experts_per_rank=dict.fromkeys(range(3), 2),
    last_switches=(),
    change=None,
    num_fences=0,
    failed=None,
)
SWITCH = SwitchRecord(membership_epoch=1, members=(0, 1), stall_s=0.25, num_bytes=64, at=5.0)
SMALL = replace(
    FULL,
    membership_epoch=1,
    members=(0, 1),
    routed=(0,),
    states={0: "serving", 1: "draining", 2: "parked"},
    experts_per_rank={0: 3, 1: 3},
    last_switches=(SWITCH,),
)


def test_the_membership_as_json() -> None:
    found = membership_json(SMALL, mode="elastic", release="drained", clock_zero_s=100.0)
    assert json.loads(json.dumps(found)) == {
        "mode": "elastic",
        "membership_epoch": 1,
        "members": [0, 1],
        "routed": [0],
        "states": {"0": "serving", "1": "draining", "2": "parked"},
        "nodes": found["nodes"],
        "weight_versions": {"0": "7", "1": "7", "2": "7"},
        "floor": 1,
        "experts_per_rank": {"0": 3, "1": 3},
        "last_switches": [
            {"membership_epoch": 1, "members": [0, 1], "stall_s": 0.25, "num_bytes": 64, "at": 105.0}
        ],
        "lost": [],
        "recoveries": [],
        "recovering": None,
        "change": None,
        "num_fences": 0,
        "failed": None,
        "release": "drained",
    }


def test_events_between_two_statuses() -> None:
    assert list(events_between(FULL, SMALL)) == [
        {"type": "switch", "membership_epoch": 1, "members": [0, 1], "stall_s": 0.25, "num_bytes": 64},
        {"type": "state", "membership_epoch": 1, "ep_rank": 1, "from": "serving", "to": "draining"},
        {"type": "state", "membership_epoch": 1, "ep_rank": 2, "from": "serving", "to": "parked"},
    ]
    assert list(events_between(SMALL, replace(SMALL, change="...", num_fences=1))) == []
    failed = list(events_between(SMALL, replace(SMALL, failed="a rank was lost")))
    assert failed == [{"type": "failed", "membership_epoch": 1, "reason": "a rank was lost"}]
    assert list(events_between(replace(SMALL, failed="x"), replace(SMALL, failed="x"))) == []


@pytest.mark.parametrize(
    ("num_ranks", "load", "leavers"),
    [(1, {}, (2,)), (1, {0: 2, 1: 0, 2: 1}, (1,)), (2, {0: 2, 1: 3, 2: 1}, (0, 2)), (9, {}, (0, 1, 2))],
)
def test_ranks_with_fewest_requests_leave(
    num_ranks: int, load: dict[int, int], leavers: tuple[int, ...]
) -> None:
    assert choose_leavers(num_ranks, FULL, load) == leavers


def test_ranks_that_are_away_return_in_order() -> None:
    assert choose_returners(1, SMALL) == (1,)
    assert choose_returners(2, SMALL) == (1, 2)
    with pytest.raises(ValueError, match="num_ranks=3: 2 ranks are parked or on their way there"):
        choose_returners(3, SMALL)
