"""Prepared member sets in the configuration: what is refused, and how the server hears of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from flexfloor.config.membership_rules import check_membership
from flexfloor.config.schema import MembershipConfig, MembershipMode
from flexfloor.errors import ConfigError
from flexfloor.rollout.server import _membership_flags


def membership(*sets: list[int], mode: MembershipMode = MembershipMode.elastic) -> MembershipConfig:
    return MembershipConfig(mode=mode, floor=2, member_sets=list(sets))


def check(config: MembershipConfig) -> None:
    check_membership(
        SimpleNamespace(  # type: ignore[arg-type]
            membership=config,
            rollout=SimpleNamespace(ep_size=4),
            cluster=SimpleNamespace(num_nodes=1, server_url=None),
        )
    )


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ([[0, 4]], "not a set of ranks of the group of rollout.ep_size=4"),
        ([[0, -1]], "not a set of ranks"),
        ([[0, 1], [1, 1, 2]], "not a set of ranks"),
        ([[0, 1, 2], [3]], r"smaller than membership.floor=2"),
        ([[0, 1], [1, 0]], "a set is named twice"),
    ],
)
def test_sets_that_the_group_cannot_have_are_refused(sets: list[list[int]], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        check(membership(*sets))
    assert refused.value.key == "membership.member_sets"


def test_the_server_gets_the_sets_as_one_flag() -> None:
    sets = membership([0, 1, 2], [3, 1])
    check(sets)
    assert _membership_flags(sets, Path("f"))["flexfloor-member-sets"] == "0,1,2;3,1"
    assert _membership_flags(membership(), Path("f"))["flexfloor-member-sets"] is None


def test_a_static_group_may_keep_the_key() -> None:
    check(membership([0, 9], mode=MembershipMode.static))
