"""Where the data-parallel controller sends requests while ranks are away."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from elastic_fakes import stand_in
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.elastic.routing import (
    WorkerSocket,
    deliver_to_named_rank,
    dispatch_to_active,
    encode,
    send_control,
    update,
)


class Budget:
    """SGLang 0.5.23's DPBudget, as far as `dispatch` goes."""

    def __init__(self, loads: list[tuple[int, int]]) -> None:
        self.total_requests = [requests for requests, _ in loads]
        self.total_tokens = [tokens for _, tokens in loads]

    def dispatch(self, method: str, estimated_tokens: int = 0) -> int:
        if method == "total_requests":
            target = self.total_requests.index(min(self.total_requests))
        else:
            loads = list(zip(self.total_tokens, self.total_requests, strict=True))
            target = loads.index(min(loads))
        self.total_requests[target] += 1
        self.total_tokens[target] += estimated_tokens
        return target


class Controller:
    def __init__(self, status: list[bool]) -> None:
        self.status = status
        self.dp_active = [True] * len(status)
        self.workers: list[str | None] = [f"socket {rank}" for rank in range(len(status))]
        self.dp_budget = Budget([(0, 0)] * len(status))
        self._refresh_active_workers()

    def _refresh_active_workers(self) -> None:
        self._active_workers = [
            rank for rank, active in enumerate(self.dp_active) if active and self.status[rank]
        ]

    def update_active_ranks(self, ranks: SimpleNamespace) -> None:
        assert len(ranks.status) == len(self.workers), "SGLang ignores a status of another length"
        self.status = list(ranks.status)


def route(controller: Controller, status: list[bool], members: list[int] | None = None) -> None:
    """What the manager's message does: `members` are all ranks where they are not given."""
    num_ranks = len(status)
    routed = [rank for rank, is_routed in enumerate(status) if is_routed]
    flags = encode(routed, range(num_ranks) if members is None else members, num_ranks)
    update(Controller.update_active_ranks, controller, SimpleNamespace(status=flags))


METHODS = ("total_requests", "total_tokens")
LOADS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9999)), min_size=1, max_size=6)


def dispatch(controller: Controller, method: str, tokens: int = 0) -> int:
    chosen: int = dispatch_to_active(Budget.dispatch, controller.dp_budget, method, estimated_tokens=tokens)
    return chosen


@given(LOADS, st.data(), st.sampled_from(METHODS))
def test_the_least_loaded_active_rank_is_chosen_and_counts_stay_true(
    loads: list[tuple[int, int]], data: st.DataObject, method: str
) -> None:
    status = data.draw(st.lists(st.booleans(), min_size=len(loads), max_size=len(loads)).filter(any))
    controller = Controller(status)
    controller.dp_budget = budget = Budget(loads)
    route(controller, status)
    target = dispatch(controller, method, tokens=10)
    active = [rank for rank, is_active in enumerate(status) if is_active]
    assert target in active
    key = 0 if method == "total_requests" else 1
    assert loads[target][key] == min(loads[rank][key] for rank in active)
    after = [(r, t) for r, t in zip(budget.total_requests, budget.total_tokens, strict=True)]
    expected = [(r + 1, t + 10) if rank == target else (r, t) for rank, (r, t) in enumerate(loads)]
    assert after == expected


def test_routing_follows_the_status_both_ways() -> None:
    controller = Controller([True, True, True])
    route(controller, [True, False, False])
    assert controller._active_workers == [0]
    assert {dispatch(controller, "total_tokens") for _ in range(5)} == {0}
    route(controller, [True, True, True])
    assert controller._active_workers == [0, 1, 2]
    assert dispatch(controller, "total_requests") == 1


def test_control_calls_enter_at_the_first_member_even_while_it_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, str]] = []
    stand_in(
        monkeypatch,
        "sglang.srt.managers.data_parallel_controller",
        sock_send=lambda socket, message: sent.append((socket, message)),
    )
    controller, own = Controller([True] * 3), []
    send_control(lambda _controller, message: own.append(message), controller, "before")
    # Rank 0 drains; SGLang would enter at rank 1, which the others do not listen to.
    route(controller, [False, True, True], members=[0, 1, 2])
    send_control(lambda _controller, message: own.append(message), controller, "abort")
    route(controller, [False, True, True], members=[1, 2])
    send_control(lambda _controller, message: own.append(message), controller, "flush")
    assert own == ["before"]
    assert sent == [("socket 0", "abort"), ("socket 1", "flush")]


def test_before_any_change_dispatch_is_sglangs_own() -> None:
    budget = Budget([(3, 0), (1, 0)])
    assert dispatch_to_active(Budget.dispatch, budget, "total_requests") == 1


def test_counts_are_put_back_when_dispatch_fails() -> None:
    controller = Controller([True, True])
    route(controller, [True, False])

    def fail(_budget: Budget) -> None:
        raise RuntimeError("no rank")

    with pytest.raises(RuntimeError, match="no rank"):
        dispatch_to_active(fail, controller.dp_budget)
    assert controller.dp_budget.total_requests == [0, 0]
    assert controller.dp_budget.total_tokens == [0, 0]


class Sglang:
    """`maybe_external_dp_rank_routing` and the socket that it writes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[object] = []
        self.asked: list[object] = []
        name = "sglang.srt.managers.data_parallel_controller"
        stand_in(monkeypatch, name, sock_send=lambda socket, _: self.sent.append(socket))

    def route(self, _controller: Any, request: Any) -> bool:
        self.asked.append(request.routed_dp_rank)
        return request.routed_dp_rank is not None


@pytest.mark.parametrize("rank", [None, 0])
def test_unnamed_and_active_ranks_are_sglangs_affair(
    monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    sglang = Sglang(monkeypatch)
    request = SimpleNamespace(routed_dp_rank=rank)
    assert deliver_to_named_rank(sglang.route, Controller([True, False]), request) is (rank is not None)
    assert (sglang.asked, sglang.sent) == ([rank], [])


def test_a_rank_that_is_away_gets_the_request_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = Sglang(monkeypatch)
    request = SimpleNamespace(routed_dp_rank=1)
    assert deliver_to_named_rank(sglang.route, Controller([True, False]), request) is True
    assert (sglang.asked, sglang.sent) == ([], ["socket 1"])


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_rank_that_does_not_exist_is_left_to_sglang_to_refuse(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    sglang = Sglang(monkeypatch)
    controller = Controller([True, False, False])
    controller.workers[2] = None
    deliver_to_named_rank(sglang.route, controller, SimpleNamespace(routed_dp_rank=rank))
    assert (sglang.asked, sglang.sent) == ([rank], [])


def test_a_message_for_a_rank_that_is_gone_is_dropped_and_nobody_waits(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as bound, context.socket(zmq.PULL) as rank:
        for socket in (bound, rank):
            socket.linger = 0
        address = f"ipc://{tmp_path}/rank"
        bound.bind(address)
        rank.connect(address)
        worker = WorkerSocket(bound, 2)
        worker.send_pyobj("first")
        assert rank.poll(10_000)
        assert rank.recv_pyobj() == "first"
        rank.close()
        # Till ZeroMQ has seen it go, a message may still go nowhere.
        give_up_at_s = time.monotonic() + 10.0
        while bound.poll(0, zmq.POLLOUT):
            assert time.monotonic() < give_up_at_s
        worker.send(b"dropped")
        worker.send_pyobj("dropped")
        assert worker.type == zmq.PUSH
