"""Ranks are lost at every point of an iteration, a switch and a recovery; the others answer the same."""

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from played_group import PlayedServer
from played_ranks import NUM_RANKS, Control, Work

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

Start = Callable[..., PlayedServer]
_names = itertools.count()
POINTS = (("broadcast", 0), ("prefill", 2), ("gather", 0))
"""What runs without --full, too."""
RARE = (("prepare", 0), ("prepare", 3), ("switch", 3))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[PlayedServer] = []

    def begin(**options: float) -> PlayedServer:
        servers.append(PlayedServer(tmp_path, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def submit(
    server: PlayedServer, length: int, ranks: tuple[int, ...] = tuple(range(NUM_RANKS))
) -> dict[int, list[Work]]:
    """Two requests for each of these ranks."""
    works = {}
    for rank in ranks:
        works[rank] = [
            Work(f"w{next(_names)}", 3 + 17 * rank + place, length + 5 * place) for place in range(2)
        ]
        for work in works[rank]:
            server.send(rank, work)
    return works


def all_of(works: dict[int, list[Work]], *, but: tuple[int, ...] = ()) -> list[Work]:
    return [work for rank, own in works.items() if rank not in but for work in own]


def assert_goes_on(server: PlayedServer, works: dict[int, list[Work]], *lost: int) -> None:
    """The lost ranks' requests have right beginnings, all others and the next rollout right answers."""
    server.wait_lost(*lost)
    server.assert_whole(all_of(works, but=lost))
    server.assert_right_so_far([work for rank in lost for work in works.get(rank, [])])
    assert sorted(server.abandoned) == list(lost)
    members = server.status().members
    again = submit(server, 20, members)
    server.send(members[0], Control(f"after {lost}"))
    server.assert_whole(all_of(again))
    server.wait(
        lambda: all(server.controls(r)[-1:] == [f"after {lost}"] for r in members), "controls everywhere"
    )
    assert server.status().failed is None


def test_a_rank_is_killed_while_decoding_then_rank_0_then_another(start: Start) -> None:
    server = start()
    alive = [0, 1, 2, 3]
    for victim in (2, 0, 3):
        works = submit(server, 60, tuple(alive))
        server.wait_tokens(all_of(works), 8)
        server.signal(victim)
        alive.remove(victim)
        server.wait(lambda: victim in server.status().lost, "lost")  # noqa: B023
        lost = tuple(sorted({0, 1, 2, 3} - set(alive)))
        server.wait_lost(*lost)
        server.assert_whole(all_of(works, but=(victim,)))
        server.assert_right_so_far(works[victim])
        assert server.status().members == tuple(alive)
    recoveries = server.status().recoveries
    assert [recovery.lost for recovery in recoveries] == [(2,), (0,), (3,)]
    assert all(recovery.num_bytes > 0 for recovery in recoveries)
    assert server.abandoned == [2, 0, 3]
    works = submit(server, 20, (1,))
    server.assert_whole(all_of(works))


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        pytest.param(point, victim, marks=[] if (point, victim) in POINTS else pytest.mark.full)
        for point in ("broadcast", "gather", "prefill", "decode", "idle")
        for victim in (0, 2)
    ],
)
def test_a_rank_dies_at_a_point_of_the_iteration(start: Start, point: str, victim: int) -> None:
    server = start()
    busy = tuple(rank for rank in range(NUM_RANKS) if point != "idle" or rank != victim)
    works = submit(server, 50, busy)
    server.wait_tokens(all_of(works), 5)
    for number in range(5):
        server.send(0, Control(f"c{number}"))
    armed = server.arm("kill", victim, point)
    if point == "prefill":
        works[victim] += submit(server, 50, (victim,))[victim]
    server.wait(lambda: not armed.exists(), "hit")
    assert_goes_on(server, works, victim)
    # Whatever reached the group reached all of it, once and in order.
    seen = [server.controls(rank) for rank in server.status().members]
    assert all(one == seen[0] for one in seen)
    assert len(set(seen[0])) == len(seen[0])


@pytest.mark.parametrize("point", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_a_recurrent_state_takes_no_pass_twice(start: Start, point: str) -> None:
    server = start(is_recurrent=True)
    works = submit(server, 60)
    server.wait_tokens(all_of(works), 5)
    armed = server.arm("kill", 2, point)
    works[1] += submit(server, 50, (1,))[1]
    works[2] += submit(server, 50, (2,))[2]
    server.wait(lambda: not armed.exists(), "hit")
    assert_goes_on(server, works, 2)
    # Those whose pass broke; a rank that was idle, or had ended the pass, has nothing to make good.
    assert set(server.tokens("prefilled again")) & {0, 1, 3}


@pytest.mark.full
def test_two_ranks_are_killed_at_once(start: Start) -> None:
    server = start()
    works = submit(server, 60)
    server.wait_tokens(all_of(works), 8)
    server.signal(0)
    server.signal(3)
    assert_goes_on(server, works, 0, 3)


@pytest.mark.parametrize("point", [pytest.param("recovery", marks=pytest.mark.full), "restored"])
def test_another_rank_dies_in_the_recovery(start: Start, point: str) -> None:
    server = start()
    works = submit(server, 60)
    server.wait_tokens(all_of(works), 8)
    armed = server.arm("kill", 1, point)
    server.signal(2)
    server.wait(lambda: not armed.exists(), "hit")
    assert_goes_on(server, works, 1, 2)


@pytest.mark.parametrize(
    ("point", "victim"), [("switch", 0), *(pytest.param(*one, marks=pytest.mark.full) for one in RARE)]
)
def test_a_rank_dies_in_a_release(start: Start, point: str, victim: int) -> None:
    """Rank 3 leaves; it dies itself, or a survivor does."""
    server = start()
    works = submit(server, 60, (0, 1, 2))
    server.wait_tokens(all_of(works), 5)
    armed = server.arm("kill", victim, point)
    released = server.manager.release((3,))
    server.wait(lambda: not armed.exists(), "hit")
    server.result(released)
    assert_goes_on(server, works, victim)


@pytest.mark.parametrize(
    ("point", "victim"), [("switch", 0), *(pytest.param(*one, marks=pytest.mark.full) for one in RARE)]
)
def test_a_rank_dies_while_another_returns(start: Start, point: str, victim: int) -> None:
    server = start()
    assert server.result(server.manager.release((3,))).ok
    works = submit(server, 60, (0, 1, 2))
    server.wait_tokens(all_of(works), 5)
    armed = server.arm("kill", victim, point)
    returned = server.manager.rejoin((3,))
    server.wait(lambda: not armed.exists(), "hit")
    server.result(returned)
    assert_goes_on(server, works, victim)


def test_a_parked_rank_is_killed_and_nobody_notices(start: Start) -> None:
    server = start()
    assert server.result(server.manager.release((3,))).ok
    works = submit(server, 40, (0, 1, 2))
    server.wait_tokens(all_of(works), 5)
    server.signal(3)
    assert_goes_on(server, works, 3)
    assert server.status().recoveries == ()


def test_a_parked_rank_ends_with_its_server(start: Start) -> None:
    server = start()
    assert server.result(server.manager.release((3,))).ok
    works = submit(server, 40, (0, 1, 2))
    server.wait_tokens(all_of(works), 5)
    server.manager.stand_down()
    server.wait(lambda: server.exit_code(3) == 0, "ended")
    # Those in the group are told by SGLang; till then they go on, and nobody is lost.
    server.assert_whole(all_of(works))
    assert server.status().lost == ()


def test_a_parked_rank_takes_part_and_returns_where_the_floor_needs_it(start: Start) -> None:
    server = start(floor=3)
    assert server.result(server.manager.release((1,))).ok
    works = submit(server, 60, (0, 2, 3))
    server.wait_tokens(all_of(works), 5)
    server.signal(2)
    assert_goes_on(server, works, 2)
    assert server.status().members == (0, 1, 3)


@pytest.mark.full
def test_parked_ranks_return_after_a_loss(start: Start) -> None:
    server = start()
    assert server.result(server.manager.release((1,))).ok
    works = submit(server, 40, (0, 2, 3))
    server.wait_tokens(all_of(works), 5)
    server.signal(2)
    assert_goes_on(server, works, 2)
    assert server.result(server.manager.rejoin((1,))).ok
    assert server.status().members == (0, 1, 3)
    works = submit(server, 30, (0, 1, 3))
    server.assert_whole(all_of(works))
    assert server.result(server.manager.release((0, 3))).ok
    works = submit(server, 30, (1,))
    server.assert_whole(all_of(works))


def test_below_the_floor_there_is_one_clear_reason(start: Start) -> None:
    server = start(floor=4)
    works = submit(server, 60)
    server.wait_tokens(all_of(works), 5)
    server.signal(2)
    assert server.failed.wait(60.0)
    assert "floor" in server.reason
    assert "2" in server.reason
    server.assert_right_so_far(all_of(works))


def test_a_stopped_rank_is_found_by_its_silence_and_ended(start: Start) -> None:
    server = start(heartbeat_timeout_s=3.0)
    works = submit(server, 60)
    server.wait_tokens(all_of(works), 8)
    server.signal(1, signal.SIGSTOP)
    assert_goes_on(server, works, 1)


def update(server: PlayedServer, version: str) -> None:
    """A weight update, which reaches every rank."""
    server.send(0, Control(f"update {version}", new_version=version))


def test_experts_come_back_from_the_mirror_of_the_last_update(start: Start) -> None:
    server = start()
    update(server, "8")
    server.wait(lambda: all(server.controls(rank) for rank in range(NUM_RANKS)), "updated")
    server.manager.weights_updated("8")
    works = submit(server, 60)
    server.wait_tokens(all_of(works), 5)
    server.signal(2)
    assert_goes_on(server, works, 2)
    assert set(server.status().weight_versions.values()) == {"8"}


def test_a_loss_during_a_weight_update_ends_the_group_with_the_reason(start: Start) -> None:
    server = start()
    armed = server.arm("kill", 2, "update")
    update(server, "8")
    assert server.failed.wait(60.0)
    assert not armed.exists()
    assert "weight" in server.reason, server.reason
