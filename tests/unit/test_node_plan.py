"""What each node of a job runs."""

import msgspec
import pytest

from flexfloor.node_plan import NodePlan, Place, decode_plan, encode_plan, server_argv_on, trainer_place


def make_plan(*, is_elastic: bool = True) -> NodePlan:
    return NodePlan(
        server_argv=["python", "-m", "sglang_patches.serve", "--host", "n1", "--port", "2000"],
        server_ranks=4,
        server_url="http://n1:2000",
        is_elastic=is_elastic,
        trainer_spec="/run/trainer.json",
        trainer_ranks=2,
        device="cpu",
    )


def flags(argv: list[str]) -> dict[str, str]:
    return dict(zip(argv[3::2], argv[4::2], strict=True))


def test_a_plan_survives_the_file() -> None:
    assert decode_plan(encode_plan(make_plan())) == make_plan()
    with pytest.raises(msgspec.ValidationError):
        decode_plan(b"{}")


def test_one_node_serves_as_if_there_were_no_others() -> None:
    place = Place(num_nodes=1, node_rank=0, address="")
    assert server_argv_on(make_plan(), place, None) == make_plan().server_argv
    assert trainer_place(make_plan(), place) == (None, None)


def test_nodes_meet_at_node_0_under_ports_of_their_own() -> None:
    found = [
        flags(
            server_argv_on(
                make_plan(), Place(num_nodes=2, node_rank=rank, address="n1:2020"), "tcp://n1:2040"
            )
        )
        for rank in range(2)
    ]
    assert [one["--port"] for one in found] == ["2000", "2001"]
    assert [one["--node-rank"] for one in found] == ["0", "1"]
    for one in found:
        assert one["--nnodes"] == "2"
        assert one["--dist-init-addr"] == "n1:2020"
        assert one["--flexfloor-bind"] == "tcp://n1:2040"


def test_a_static_group_has_no_manager() -> None:
    place = Place(num_nodes=2, node_rank=1, address="n1:2020")
    argv = server_argv_on(make_plan(is_elastic=False), place, "tcp://n1:2040")
    assert "--flexfloor-bind" not in argv
    assert server_argv_on(make_plan(is_elastic=False), place, None) == argv


def test_the_trainer_meets_at_its_first_node() -> None:
    assert trainer_place(make_plan(), Place(num_nodes=2, node_rank=1, address="n3:2042")) == ("n3", 2042)
    assert trainer_place(make_plan(), Place(num_nodes=2, node_rank=1, address="[::1]:2042")) == (
        "[::1]",
        2042,
    )


@pytest.mark.parametrize(
    ("place", "bind", "reason"),
    [
        (Place(num_nodes=3, node_rank=0, address="n1:2020"), "tcp://n1:1", "4, do not divide by 3 nodes"),
        (
            Place(num_nodes=2, node_rank=2, address="n1:2020"),
            "tcp://n1:1",
            "there are 2 nodes",
        ),
        (Place(num_nodes=2, node_rank=0, address="n1"), "tcp://n1:1", "need HOST:PORT"),
        (Place(num_nodes=2, node_rank=0, address="n1:2020"), None, "needs --bind tcp://HOST:PORT"),
    ],
)
def test_what_cannot_work_is_refused(place: Place, bind: str | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        server_argv_on(make_plan(), place, bind)
