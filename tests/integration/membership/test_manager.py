"""Manager, agents and client over real sockets; the ranks are played."""

import dataclasses
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq
from fleet import DEADLINE_S, Fleet, hello

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership import messages as m
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.errors import FenceRefused, MembershipFailed
from flexfloor.membership.manager import Manager
from flexfloor.membership.state import Membership
from flexfloor.rollout.ports import free_base_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint.local(tmp_path / "m")


def test_shrink_and_rejoin(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.ranks[2].num_work = 1
        leaving = fleet.manager.release((1, 2), operation_id="first")
        fleet.turn_until(lambda: fleet.members == (0, 2))
        assert not leaving.done()
        assert fleet.routings[-1] == ((0,), (0, 2))
        fleet.ranks[2].num_work = 0
        result = fleet.finish(leaving)
        assert (result.operation_id, result.ok, result.membership_epoch) == ("first", True, 2)
        assert fleet.members == (0,)
        assert fleet.finish(fleet.manager.release((1,), operation_id="first")) == result
        assert fleet.finish(fleet.manager.rejoin()).ok
        assert fleet.routings == [
            ((0, 1, 2), (0, 1, 2)),
            ((0,), (0, 1, 2)),
            ((0,), (0, 2)),
            ((0,), (0,)),
            ((0, 1, 2), (0, 1, 2)),
        ]
        status = fleet.manager.status()
        assert status.membership_epoch == 3
        assert [switch.members for switch in status.last_switches] == [(0, 2), (0,), (0, 1, 2)]
        assert status.last_switches[0].num_bytes == 24
        assert fleet.manager.num_dropped == {}


def test_plan_brings_the_mailboxes_of_old_and_new_members(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.ranks[0].votes = False
        fleet.manager.release((1,))
        fleet.turn_until(lambda: all(rank.plan for rank in fleet.ranks))
        plan = fleet.ranks[2].plan
        assert plan.mailboxes == {0: "box0", 1: "box1", 2: "box2"}
        assert plan.new_placement.members == (0, 2)
        assert fleet.manager.hellos()[1].patches == ["sglang.a"]
        assert fleet.manager.hellos()[1].token == ""


def test_work_wakes_a_parked_rank(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.finish(fleet.manager.release((0, 2)))
        fleet.ranks[2].num_work = 1
        fleet.turn_until(lambda: fleet.members == (1, 2))
        assert fleet.routings[-1] == ((1, 2), (1, 2))


def test_leaver_with_work_cancels_the_change(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.ranks[0].votes = False
        leaving = fleet.manager.release((1,))
        fleet.turn_until(lambda: fleet.ranks[1].plan)
        fleet.ranks[1].num_work = 1
        fleet.turn_until(lambda: fleet.manager.status().change is None)
        assert fleet.ranks[1].has_asked
        fleet.ranks[0].votes, fleet.ranks[1].num_work = True, 0
        assert fleet.finish(leaving).membership_epoch == 2


def test_plan_that_is_out_too_long_is_cancelled_and_tried_again(endpoint: Endpoint) -> None:
    with Fleet(endpoint, prepare_timeout_s=0.2) as fleet:
        fleet.ranks[0].votes = False
        leaving = fleet.manager.release((1,))
        fleet.turn_until(lambda: "membership_epoch=2 " in (fleet.manager.status().change or ""))
        fleet.ranks[0].votes = True
        result = fleet.finish(leaving)
        assert (result.ok, result.membership_epoch) == (True, 2)


def test_release_under_the_floor_is_refused(endpoint: Endpoint) -> None:
    with Fleet(endpoint, floor=2) as fleet:
        result = fleet.manager.release((0, 1)).result(DEADLINE_S)
        assert not result.ok
        assert "would leave 1 of the 3 ranks that take requests, and the floor is 2" in result.reason


def test_fences_hold_changes_and_full_ones_expand_first(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.finish(fleet.manager.release((1,)))
        fence = fleet.finish(fleet.manager.fence(full=True))
        assert fleet.members == (0, 1, 2)
        fleet.manager.weights_updated(7)
        fleet.manager.release((2,))
        fleet.turn_until(lambda: fleet.ranks[2].has_reported)
        # A call that is answered after the report shows that the report has changed nothing.
        assert fleet.finish(fleet.manager.fence(full=False)) != fence
        assert fleet.members == (0, 1, 2)
        assert set(fleet.manager.status().weight_versions.values()) == {7}


def test_fence_that_nobody_waits_for_any_more_is_released(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.ranks[0].votes = False
        leaving = fleet.manager.release((1,))
        fleet.turn_until(lambda: fleet.manager.status().change)
        fence = fleet.manager.fence(full=False)
        fleet.turn_until(lambda: fleet.manager.status().num_fences == 1)
        assert fence.cancel()
        fleet.ranks[0].votes = True
        assert fleet.finish(leaving).ok
        fleet.turn_until(lambda: fleet.manager.status().num_fences == 0)


def test_parked_rank_with_old_weights_stays_out(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.finish(fleet.manager.release((1,)))
        fleet.manager.weights_updated("v2")
        result = fleet.manager.rejoin((1,)).result(DEADLINE_S)
        assert result.reason == "ep_rank 1 holds weight_version 0, the members hold v2"
        with pytest.raises(FenceRefused, match="weight_version 0"):
            fleet.manager.fence(full=True).result(DEADLINE_S)


def test_close_answers_what_waits(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        fleet.ranks[1].num_work = 1
        leaving = fleet.manager.release((1,))
        fleet.turn_until(lambda: fleet.manager.status().states[1] == "draining")
        fleet.manager.close()
        with pytest.raises(MembershipFailed, match="the manager is closed"):
            leaving.result(DEADLINE_S)
        with pytest.raises(MembershipFailed, match="the manager is closed"):
            fleet.manager.rejoin().result(DEADLINE_S)


def test_second_process_and_other_code_are_refused(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        assert refusal(endpoint, hello(1, incarnation=5)).startswith(
            "the manager refused: ep_rank 1 is serving in incarnation 101, and a second process (5)"
        )
        other = hello(1, patches=[])
        assert "ep_rank 1: patches [], ep_rank " in refusal(endpoint, other)
        assert "there is no ep_rank 3 of 3" in refusal(endpoint, hello(3))
        assert fleet.failures == []


def refusal(endpoint: Endpoint, message: m.HelloMsg) -> str:
    link = AgentLink(endpoint, message)
    link.start()
    try:
        poller = zmq.Poller()
        poller.register(link.wake_fd, zmq.POLLIN)
        assert poller.poll(1000 * DEADLINE_S)
        (order,) = link.orders()
        assert isinstance(order, m.ManagerLostMsg)
        assert link.orders() == []
        assert poller.poll(0) == []
        return order.reason
    finally:
        link.close()


def test_silent_manager_is_reported_lost(endpoint: Endpoint) -> None:
    link = AgentLink(endpoint, hello(0), heartbeat_s=0.05, manager_timeout_s=0.3)
    link.start()
    try:
        poller = zmq.Poller()
        poller.register(link.wake_fd, zmq.POLLIN)
        assert poller.poll(1000 * DEADLINE_S)
        (order,) = link.orders()
        assert order.reason.startswith(f"nothing from {endpoint.address} for ")
    finally:
        link.close()


def test_bad_frames_are_dropped_and_counted(endpoint: Endpoint, zmq_context: zmq.Context) -> None:
    with Fleet(endpoint) as fleet, zmq_context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        endpoint.connect(socket)
        wrong = msgspec.structs.replace(hello(0), token=secrets.token_hex(32))
        for frames in (
            [b""],
            [b"\xc1\xc1"],
            [b"one", b"two"],
            [m.encode({"type": "NoSuchMsg"})],
            [m.encode({"type": "ReleaseMsg", "operation_id": 1, "ep_ranks": "all"})],
            [bytes(m.MAX_FRAME_BYTES + 1)],
            [m.encode(wrong)],
            [m.encode(m.ClientHelloMsg(token=""))],
            [m.encode(m.NumberedReportMsg(1, 0, m.DrainFinishedMsg()))],
            [m.encode(m.StatusRequestMsg())],
        ):
            socket.send_multipart(frames)
        expected = {
            "malformed": 2, "num_frames": 1, "invalid": 2, "too_large": 1, "wrong_token": 2, "no_hello": 2,
        }  # fmt: skip
        fleet.turn_until(lambda: sum(fleet.manager.num_dropped.values()) == 10)
        assert fleet.manager.num_dropped == expected
        # A client may not speak for a rank.
        socket.send(m.encode(m.ClientHelloMsg(token=endpoint.token)))
        socket.send(m.encode(m.NumberedReportMsg(1, 0, m.GoodbyeMsg("not mine to say"))))
        fleet.turn_until(lambda: fleet.manager.num_dropped["no_hello"] == 3)
        assert fleet.failures == []


@pytest.fixture
def zmq_context():
    context = zmq.Context()
    yield context
    context.term()


def test_wrong_token_is_not_welcomed(endpoint: Endpoint) -> None:
    manager = Manager(endpoint, Membership(1, 1, 1), on_routing=print, on_fail=print)
    manager.start()
    link = AgentLink(dataclasses.replace(endpoint, token="guess"), hello(0))
    link.start()
    try:
        with pytest.raises(DeadlineExceeded, match="ep_rank 0: no welcome from the manager"):
            link.wait_welcome(0.3)
        with pytest.raises(DeadlineExceeded, match=r"ep_ranks \[0\] have not joined .*'wrong_token': 1"):
            manager.wait_ready(0.1)
    finally:
        link.close()
        manager.close()


def test_tcp_with_curve_keys(tmp_path: Path) -> None:
    made = Endpoint.tcp("127.0.0.1", free_base_port())
    endpoint = Endpoint.from_json(json.loads(json.dumps(dataclasses.asdict(made))))
    assert endpoint == made
    with Fleet(endpoint) as fleet, DriverClient(endpoint.for_peer(), timeout_s=DEADLINE_S) as client:
        name = client.submit_release((2,))
        fleet.turn_until(lambda: fleet.members == (0, 1))
        assert client.status().members == (0, 1)
        assert [result.operation_id for result in client.poll()] == [name]
        other = dataclasses.replace(
            Endpoint.tcp("127.0.0.1", 1), address=endpoint.address, token=endpoint.token
        )
        with DriverClient(other.for_peer(), timeout_s=0.5) as stranger, pytest.raises(DeadlineExceeded):
            stranger.status()
        plain = Endpoint(address=endpoint.address, token=endpoint.token)
        with DriverClient(plain, timeout_s=0.5) as stranger, pytest.raises(DeadlineExceeded):
            stranger.status()
        assert fleet.manager.num_dropped == {}
    with pytest.raises(ValueError, match="this is a peer's endpoint"):
        Manager(endpoint.for_peer(), Membership(1, 1, 1), on_routing=print, on_fail=print).start()


def test_driver_waits_for_results(endpoint: Endpoint, tmp_path: Path) -> None:
    client = DriverClient(Endpoint.read(tmp_path / "m"), timeout_s=DEADLINE_S)
    with Fleet(endpoint, floor=2) as fleet, client, ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(client.release, (1,))
        assert fleet.finish(leaving).ok
        refused = pool.submit(client.release, (0,)).result(DEADLINE_S)
        assert refused.reason.endswith("and the floor is 2")
        again = pool.submit(client.rejoin)
        assert fleet.finish(again).membership_epoch == 2
        assert client.poll() == []


def test_driver_deadline_tells_the_manager_s_status(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet, DriverClient(endpoint, timeout_s=0.3) as client:
        fleet.ranks[1].num_work = 1
        with pytest.raises(DeadlineExceeded) as raised:
            client.release((1,), operation_id="slow")
        text = str(raised.value)
        assert text.startswith("release of ep_ranks (1,) (operation slow): not done in 0.3 s; the manager's")
        assert "1: 'draining'" in text
        fleet.turn_until(lambda: fleet.ranks[1].is_draining)
        fleet.ranks[1].num_work = 0
        fleet.turn_until(lambda: fleet.members == (0, 2))
        assert [result.ok for result in client.poll()] == [True]


def test_driver_without_a_manager_says_so(endpoint: Endpoint) -> None:
    text = r"status: no answer from the manager at ipc://.* in 0.1 s"
    with DriverClient(endpoint, timeout_s=0.1) as client, pytest.raises(DeadlineExceeded, match=text):
        client.status()


def test_manager_and_agents_rest_when_nothing_happens(endpoint: Endpoint) -> None:
    with Fleet(endpoint) as fleet:
        before_s, start_s = time.process_time(), time.monotonic()
        poller = zmq.Poller()
        poller.register(fleet.ranks[0].link.wake_fd, zmq.POLLIN)
        assert poller.poll(1000) == []
        wall_s = time.monotonic() - start_s
        # Four threads, three of them with ten heartbeats a second.
        assert time.process_time() - before_s < 0.2 * wall_s
