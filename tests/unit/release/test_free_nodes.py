"""Which nodes are free, and what a job keeps."""

import pytest

from flexfloor.release.nodes import free_nodes, may_be_given_back, without

NODES = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "a"}


@pytest.mark.parametrize(
    ("exited", "free"),
    [
        ((), ()),
        ((2,), ()),
        ((2, 3), ("b",)),
        ((4, 3, 2), ("b", "c")),
        # The node of rank 0 holds the server, whoever of it has exited.
        ((0, 1, 5), ()),
        ((0, 1, 2, 3, 4, 5), ("b", "c")),
    ],
)
def test_a_node_is_free_when_all_its_ranks_are_gone(exited: tuple[int, ...], free: tuple[str, ...]) -> None:
    assert free_nodes(NODES, exited) == free


def test_ranks_beside_rank_0_stay_on_their_node() -> None:
    assert [rank for rank in NODES if may_be_given_back(rank, NODES)] == [2, 3, 4]


def test_a_job_keeps_its_other_nodes_in_order() -> None:
    assert without(["c", "a", "b"], "a") == ("c", "b")
    with pytest.raises(ValueError, match="node d is not among the job's nodes a, b"):
        without(["a", "b"], "d")
    with pytest.raises(ValueError, match="node a is the job's last one"):
        without(["a"], "a")
