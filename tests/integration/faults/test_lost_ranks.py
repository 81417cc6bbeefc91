"""Ranks of a real server are killed while they decode; the others answer the same, and go on."""

from collections.abc import Sequence

import pytest
import requests
from faulty_server import FaultyServer, Stream, again, kill, make_streams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LENGTHS = (60, 40, 30)


def assert_same(oracle: Sequence[Stream], streams: Sequence[Stream], *, lost: int) -> None:
    """All whole and the same, but for those of the lost rank: a right beginning, and the reason."""
    for expected, found in zip(oracle, streams, strict=True):
        assert found.error == ""
        if found.dp_rank == lost:
            assert found.lost_rank_message == f"flexfloor: dp rank {lost} lost"
            assert found.tokens == expected.tokens[: len(found.tokens)]
        else:
            assert found.is_whole, found
            assert found.tokens == expected.tokens


@pytest.fixture(scope="module")
def oracle(dying_server: FaultyServer) -> Sequence[Stream]:
    streams = dying_server.run(make_streams(LENGTHS, seed=1))
    assert all(stream.is_whole for stream in streams)
    return streams


@pytest.mark.parametrize(("victim", "stand_in", "left"), [(2, 2, (0, 1, 3)), (0, 1, (1, 3))])
def test_a_rank_is_killed_while_decoding(
    dying_server: FaultyServer, oracle: Sequence[Stream], victim: int, stand_in: int, left: tuple[int, ...]
) -> None:
    pids = dying_server.pids()
    lost_before = dying_server.status().lost
    streams = again(oracle, dp_rank=lambda s: stand_in if s.dp_rank in lost_before else s.dp_rank)
    running = dying_server.send(streams)
    running.wait_tokens(5)
    kill(pids[victim])
    running.join()
    assert_same(oracle, streams, lost=victim)
    assert any(stream.lost_rank_message for stream in streams)
    status = dying_server.wait_for(lambda s: s.members == left and s.recovering is None)
    assert status.lost == tuple(sorted({*lost_before, victim}))
    assert status.recoveries[-1].num_bytes > 0
    # From where they were, elsewhere: what a driver does with them.
    moved = [
        Stream((*stream.prompt, *stream.tokens), stream.num_tokens - len(stream.tokens), None)
        for stream in streams
        if stream.dp_rank == victim
    ]
    dying_server.run(moved)
    expected = [one.tokens for one, found in zip(oracle, streams, strict=True) if found.dp_rank == victim]
    before = [found.tokens for found in streams if found.dp_rank == victim]
    assert [[*a, *b.tokens] for a, b in zip(before, moved, strict=True)] == expected
    # And the next rollout.
    assert_same(oracle, dying_server.run(again(oracle, dp_rank=lambda _: None)), lost=-1)


def test_a_request_for_a_lost_rank_ends_at_once(dying_server: FaultyServer) -> None:
    (stream,) = dying_server.run([Stream((5, 6, 7), 10, 2)])
    assert stream.lost_rank_message == "flexfloor: dp rank 2 lost"
    assert stream.tokens == []


def test_weights_are_not_updated_without_a_rank(dying_server: FaultyServer) -> None:
    server = dying_server.server
    answer = server.raw_post("update_weights_from_disk", model_path="anything", weight_version="9001")
    assert "has left for good" in answer.text
    assert "Fix: restart the server" in answer.text


def test_the_ranks_that_are_left_leave_and_return(
    dying_server: FaultyServer, oracle: Sequence[Stream]
) -> None:
    assert dying_server.client.release([1]).ok
    assert_same(oracle, dying_server.run(again(oracle, dp_rank=lambda _: None)), lost=-1)
    assert dying_server.client.rejoin().ok
    assert dying_server.status().members == (1, 3)
    assert_same(oracle, dying_server.run(again(oracle, dp_rank=lambda _: None)), lost=-1)
    found = requests.get(f"{dying_server.server.url}/flexfloor/membership", timeout=30).json()
    assert found["lost"] == [0, 2]
    assert [row["lost"] for row in found["recoveries"]] == [[2], [0]]
