"""The server's own release at work: requests come and end, ranks are let go and brought back."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from flexfloor.membership.status import MembershipStatus, OperationResult
from sglang_patches.release.control import ReleaseControl
from sglang_patches.release.rule import ServerRelease
from sglang_patches.release.tracker import RequestTracker, SentRequest
from sglang_patches.static_group import StaticGroup

FULL = StaticGroup(4, 8, lambda: "7").status()


class PlayedGroup:
    """Takes orders; the test says what becomes of them."""

    def __init__(self) -> None:
        self.states = dict.fromkeys(range(4), "serving")
        self.num_fences = 0
        self.released: list[tuple[int, ...]] = []
        self.num_rejoins = 0
        self.order: Future[OperationResult] = Future()

    def status(self) -> MembershipStatus:
        return MembershipStatus(
            **{
                **{name: getattr(FULL, name) for name in FULL.__slots__},
                "states": self.states,
                "floor": 1,
                "num_fences": self.num_fences,
            }
        )

    def release(self, ep_ranks: tuple[int, ...], *_more: Any) -> "Future[OperationResult]":
        self.released.append(ep_ranks)
        self.order = Future()
        return self.order

    def rejoin(self, *_more: Any) -> "Future[OperationResult]":
        self.num_rejoins += 1
        return Future()

    def taken_up(self) -> "Future[None]":
        return Future()

    def park(self, *ep_ranks: int) -> None:
        self.states |= dict.fromkeys(ep_ranks, "parked")
        self.order.set_result(OperationResult(operation_id="x", ok=True, reason="", membership_epoch=1))


class Played:
    def __init__(self) -> None:
        self.group = PlayedGroup()
        self.live: dict[str, Any] = {}
        self.tracker = RequestTracker()
        self.now_s = 0.0
        self.is_on = True
        self.control = ReleaseControl(
            self.group,
            ServerRelease(4, quiet_s=0.1),
            self.tracker,
            self.live,
            is_on=lambda: self.is_on,
            clock=lambda: self.now_s,
        )

    def send(self, name: str, named: int | None = None) -> int:
        rank = self.control.place(named)
        state = SimpleNamespace(output_ids=[])
        self.live[name] = state
        self.tracker.send(
            SentRequest(request_id=name, dp_rank=rank, prompt_tokens=1, cap_tokens=9, state=state)
        )
        return rank

    def look(self, at_s: float) -> list[tuple[int, ...]]:
        self.now_s = at_s
        self.control.look()
        return self.group.released


def test_ranks_leave_one_order_after_the_other_as_they_drain() -> None:
    played = Played()
    assert [played.send(name) for name in "abcd"] == [0, 1, 2, 3]
    del played.live["b"]
    assert played.look(0.05) == []
    assert played.look(0.2) == [(1,)]
    del played.live["c"]
    assert played.look(0.3) == [(1,)], "one order at a time"
    played.group.park(1)
    assert played.look(0.4) == [(1,), (2,)]


def test_nobody_is_let_go_while_it_is_off_or_a_control_call_holds_the_group() -> None:
    played = Played()
    played.send("a")
    played.is_on = False
    assert played.look(1.0) == []
    played.is_on, played.group.num_fences = True, 1
    assert played.look(2.0) == []
    played.group.num_fences = 0
    assert played.look(3.0) == [(1, 2, 3)]


def test_a_refusal_is_waited_out() -> None:
    played = Played()
    played.send("a")
    played.look(1.0)
    refusal = OperationResult(operation_id="x", ok=False, reason="the floor", membership_epoch=0)
    played.group.order.set_result(refusal)
    assert len(played.look(1.1)) == 1
    assert len(played.look(2.2)) == 2


def test_the_next_step_brings_everybody_back_in_one_go() -> None:
    played = Played()
    played.send("a")
    played.look(1.0)
    played.group.park(1, 2, 3)
    played.live.clear()
    played.look(2.0)
    assert [played.send(name) for name in "bcde"] == [0, 1, 2, 3]
    assert played.group.num_rejoins == 1


def test_it_looks_until_the_last_request_is_over() -> None:
    played = Played()
    looks: list[int] = []
    look = played.control.look

    def count() -> None:
        looks.append(len(played.tracker))
        if len(looks) == 3:
            played.live.clear()
        look()

    played.control.look = count  # type: ignore[method-assign]

    async def run() -> None:
        played.send("a")
        played.control.watch()
        played.control.watch()
        assert played.control._watch is not None
        await asyncio.wait_for(played.control._watch, 20)

    asyncio.run(run())
    assert looks == [1, 1, 1]
