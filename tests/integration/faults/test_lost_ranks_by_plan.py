"""More losses on servers of their own, at named points. Long: with --full only."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_server import FaultyServer, again, kill, make_streams

from flexfloor.processes import ChildProcesses

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

LENGTHS = (60, 40, 30)


@pytest.fixture(params=["gloo", "shm"])
def faulty(request: pytest.FixtureRequest, shared_checkpoint: Path, tmp_path: Path) -> Iterator[FaultyServer]:
    with ChildProcesses() as children:
        server = FaultyServer.start(children, shared_checkpoint, tmp_path, collectives=request.param)
        yield server.wait_ready()
        server.close()


def test_losses_one_after_the_other(faulty: FaultyServer) -> None:
    """In prefill, two at once where one dies in the recovery of the other."""
    oracle = faulty.run(make_streams(LENGTHS, seed=1))
    pids = faulty.pids()
    armed = faulty.arm("kill", 3, "prefill")
    streams = faulty.run(again(oracle))
    assert not armed.exists()
    _assert_right(oracle, streams, lost={3})
    streams = again(oracle, dp_rank=lambda s: s.dp_rank if s.dp_rank != 3 else 0)
    running = faulty.send(streams)
    running.wait_tokens(5)
    armed = faulty.arm("kill", 1, "recovery")
    kill(pids[0])
    running.join()
    assert not armed.exists()
    _assert_right(oracle, streams, lost={0, 1})
    assert faulty.status().members == (2,)
    _assert_right(oracle, faulty.run(again(oracle, dp_rank=lambda _: None)), lost=set())


def test_losses_around_a_switch(faulty: FaultyServer) -> None:
    """Parked; at a switch, not the one who leaves; stopped, and found by its silence."""
    oracle = faulty.run(make_streams(LENGTHS, seed=1))
    pids = faulty.pids()
    assert faulty.client.release([3]).ok
    kill(pids[3])
    faulty.wait_for(lambda status: status.lost == (3,))
    streams = again(oracle, dp_rank=lambda s: 0 if s.dp_rank in (2, 3) else s.dp_rank)
    running = faulty.send(streams)
    running.wait_tokens(2)
    armed = faulty.arm("kill", 1, "switch")
    faulty.client.release([2])
    running.join()
    assert not armed.exists()
    _assert_right(oracle, streams, lost={1})
    assert faulty.client.rejoin().ok
    streams = again(oracle, dp_rank=lambda s: 0 if s.dp_rank in (1, 3) else s.dp_rank)
    running = faulty.send(streams)
    running.wait_tokens(5)
    kill(pids[0], signal.SIGSTOP)
    running.join()
    _assert_right(oracle, streams, lost={0})
    assert faulty.status().members == (2,)


@pytest.mark.parametrize("flags", [(), ("--disable-overlap-schedule",)], ids=["overlap", "no_overlap"])
def test_requests_are_prefilled_again(
    flags: tuple[str, ...], shared_checkpoint: Path, tmp_path: Path
) -> None:
    """As it is with models whose state would take a broken pass twice; here asked for by flag."""
    with ChildProcesses() as children:
        own = ("--flexfloor-retry", "prefill", *flags)
        faulty = FaultyServer.start(children, shared_checkpoint, tmp_path, *own).wait_ready()
        oracle = faulty.run(make_streams(LENGTHS, seed=1))
        streams = again(oracle)
        running = faulty.send(streams)
        running.wait_tokens(5)
        armed = faulty.arm("kill", 3, "decode")
        running.join()
        assert not armed.exists()
        _assert_right(oracle, streams, lost={3})
        armed = faulty.arm("kill", 1, "prefill")
        streams = again(oracle, dp_rank=lambda s: s.dp_rank if s.dp_rank != 3 else 0)
        faulty.run(streams)
        assert not armed.exists()
        _assert_right(oracle, streams, lost={1})
        _assert_right(oracle, faulty.run(again(oracle, dp_rank=lambda _: None)), lost=set())
        faulty.close()
    assert "requests are prefilled again after a broken pass" in (tmp_path / "server.log").read_text()


def _assert_right(oracle: object, streams: object, *, lost: set[int]) -> None:
    for expected, found in zip(oracle, streams, strict=True):  # type: ignore[call-overload]
        assert found.tokens == expected.tokens[: len(found.tokens)]
        assert found.is_whole or found.dp_rank in lost, found
