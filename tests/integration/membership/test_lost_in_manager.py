"""Ranks that are lost, silent or broken, over real sockets; the ranks are played."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from fleet import DEADLINE_S, FakeRank, Fleet, hello

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership import messages as m
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.errors import FenceRefused, MembershipFailed
from flexfloor.membership.process_watch import this_node

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint.local(tmp_path / "m")


def test_silent_rank_fails_a_group_that_does_not_recover(endpoint: Endpoint) -> None:
    with Fleet(endpoint, heartbeat_timeout_s=1.0, recovers=False) as fleet:
        fleet.ranks[1].votes = False
        leaving = fleet.manager.release((2,))
        fleet.turn_until(lambda: fleet.manager.status().change)
        fleet.ranks[1].link.close()
        assert "ep_rank 1 is lost: " in leaving.result(DEADLINE_S).reason
        (failure,) = fleet.failures
        assert "in flight: change membership_epoch=1" in failure
        with pytest.raises(MembershipFailed, match="ep_rank 1 is lost"):
            fleet.manager.wait_ready(1)
        assert not fleet.manager.rejoin().result(DEADLINE_S).ok
        with pytest.raises(FenceRefused, match="ep_rank 1 is lost"):
            fleet.manager.fence(full=False).result(DEADLINE_S)


def test_goodbye_and_a_broken_protocol_fail_a_group_that_does_not_recover(endpoint: Endpoint) -> None:
    with Fleet(endpoint, recovers=False) as fleet:
        fleet.ranks[2].link.send(m.SwitchedMsg(9, 0.0, 0))
        fleet.turn_until(lambda: fleet.failures)
        fleet.ranks[0].link.send(m.GoodbyeMsg("out of memory"))
        assert "does not accept RankSwitched" in fleet.failures[0]
        assert len(fleet.failures) == 1


@pytest.fixture
def stand_in() -> Iterator[subprocess.Popen]:
    """A process that can be killed in the place of a played rank."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_killed_rank_is_seen_at_once_and_the_others_go_on(
    endpoint: Endpoint, stand_in: subprocess.Popen
) -> None:
    with Fleet(endpoint, hellos={2: {"pid": stand_in.pid, "node": this_node()}}) as fleet:
        fleet.finish(fleet.manager.release((1,)))
        stand_in.kill()
        killed_s = time.monotonic()
        dead = fleet.ranks.pop()
        fleet.turn_until(lambda: fleet.manager.status().recoveries)
        status = fleet.manager.status()
        (record,) = status.recoveries
        assert (status.lost, record.lost, record.members, record.membership_epoch) == ((2,), (2,), (0,), 2)
        assert record.detected_at - killed_s < 1.0
        assert (fleet.abandoned, fleet.failures) == ([2], [])
        assert [rank.breaks for rank in fleet.ranks] == [[(1, (2,))], [(1, (2,))]]
        assert fleet.finish(fleet.manager.rejoin()).ok
        assert fleet.members == (0, 1)
        # The lost rank's words do not count any more, and it is told to end.
        poller = zmq.Poller()
        poller.register(dead.link.wake_fd, zmq.POLLIN)
        assert poller.poll(1000 * DEADLINE_S)
        reasons = [order.reason for order in dead.link.orders() if isinstance(order, m.ManagerLostMsg)]
        text = f"the manager refused: ep_rank 2 is lost: its process (pid {stand_in.pid}) has ended"
        assert reasons == [text]
        dead.link.close()


def test_silent_rank_is_killed_before_it_counts_as_lost(
    endpoint: Endpoint, stand_in: subprocess.Popen
) -> None:
    hellos = {1: {"pid": stand_in.pid, "node": this_node()}}
    with Fleet(endpoint, heartbeat_timeout_s=1.0, hellos=hellos) as fleet:
        stand_in.send_signal(signal.SIGSTOP)
        fleet.ranks.pop(1).link.close()
        fleet.turn_until(lambda: fleet.manager.status().recoveries)
        assert stand_in.wait(DEADLINE_S) == -signal.SIGKILL
        assert fleet.members == (0, 2)


def test_broken_rank_waits_for_the_next_group_and_reports_again_for_each_loss(endpoint: Endpoint) -> None:
    with Fleet(endpoint, ep_size=4) as fleet, ThreadPoolExecutor(1) as model_thread:
        blocked, others = fleet.ranks[0], fleet.ranks[1:]
        fleet.ranks = others
        generations: list[int] = []

        def report(generation: int) -> m.BrokenMsg:
            generations.append(generation)
            return blocked.broken(generation)

        waiting = model_thread.submit(blocked.link.wait_recover, report, DEADLINE_S)
        fleet.turn_until(lambda: fleet.manager.status().recovering)
        for rank in others:
            rank.recovers = False
        others.pop().link.send(m.GoodbyeMsg("out of memory"))
        order = fleet.finish(waiting)
        assert (order.generation, order.members, generations) == (1, (0, 1, 2), [0, 1])
        # Rank 2 dies while the group is being made; whoever fails in it waits again.
        for rank in others:
            rank.recovers = True
        waiting = model_thread.submit(blocked.link.wait_recover, report, DEADLINE_S)
        others.pop().link.send(m.GoodbyeMsg("out of memory"))
        order = fleet.finish(waiting)
        assert (order.generation, order.members) == (2, (0, 1))
        blocked.recover(order)
        fleet.turn_until(lambda: fleet.manager.status().recoveries)
        assert fleet.manager.status().lost == (2, 3)
        blocked.link.close()


@pytest.mark.parametrize(
    ("manager_timeout_s", "timeout_s", "error", "text"),
    [
        (60, 0.1, DeadlineExceeded, "ep_rank 0: broken for 0.1 s, generation 0"),
        (0.2, DEADLINE_S, MembershipFailed, "nothing from"),
    ],
)
def test_wait_for_the_next_group_ends(
    endpoint: Endpoint, manager_timeout_s: float, timeout_s: float, error: type[Exception], text: str
) -> None:
    link = AgentLink(endpoint, hello(0), heartbeat_s=0.05, manager_timeout_s=manager_timeout_s)
    link.start()
    try:
        with pytest.raises(error, match=text):
            link.wait_recover(FakeRank(link, 0).broken, timeout_s)
    finally:
        link.close()
