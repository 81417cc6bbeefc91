"""What a step's controller shows a release policy, orders for it, and keeps on record."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from flexfloor.membership.events import Leave
from flexfloor.membership.status import OperationResult
from flexfloor.release.use import Park
from flexfloor.rollout import release_control
from flexfloor.rollout.control import StepControl, UnfinishedResponse
from flexfloor.rollout.release_control import ReleaseControl
from flexfloor.rollout.step_time import ModelledTime
from flexfloor.schedule_record import Absence
from flexfloor.scheduling.clocks import NeutralClock
from flexfloor.scheduling.decision import GroupView, Move, ReleaseDecision, ReleasePolicy
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.place import Planned

PREDICTION = LengthPrediction(mean_log=4.0, sd_log=0.5, cap_share=0.0, cap_tokens=1000)


class FakeClient:
    """Keeps requests open until the test answers them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.leaves: list[str] = []
        self.results: list[OperationResult] = []
        self.refusal = ""
        self.lost: tuple[int, ...] = ()

    def submit_release(self, ep_ranks: Sequence[int], leave: str) -> str:
        self.asked.append(tuple(ep_ranks))
        self.leaves.append(leave)
        return f"operation {len(self.asked) - 1}"

    def release(self, ep_ranks: Sequence[int], leave: str) -> OperationResult:
        self.leaves.append(leave)
        self.asked.append(tuple(ep_ranks))
        return _result("at once", self.refusal)

    def rejoin(self) -> OperationResult:
        return _result("rejoin", self.refusal)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(last_counters={2: {"num_iterations": 7}}, lost=self.lost)

    def poll(self) -> list[OperationResult]:
        results, self.results = self.results, []
        return results

    def answer(self, refusal: str = "") -> None:
        self.results.append(_result(f"operation {len(self.asked) - 1}", refusal))


def _result(operation_id: str, refusal: str = "") -> OperationResult:
    return OperationResult(operation_id=operation_id, ok=not refusal, reason=refusal, membership_epoch=1)


class Script(ReleasePolicy):
    """Says what the test has put there, once; else to stay."""

    def __init__(self) -> None:
        self.views: list[GroupView] = []
        self.next: ReleaseDecision | None = None

    def decide(self, view: GroupView) -> ReleaseDecision:
        self.views.append(view)
        decision, self.next = self.next or ReleaseDecision(reason="nothing pays"), None
        return decision

    def observe(self, *, predicted_s: float, observed_s: float) -> None:
        raise AssertionError("a modelled time has nothing to learn from")


@dataclass
class Step:
    """Four ranks with a response each, a clock, and the hold that a running step gives."""

    now_s: float = 100.0
    client: FakeClient = field(default_factory=FakeClient)
    policy: Script = field(default_factory=Script)
    moves: list[tuple[str, int]] = field(default_factory=list)
    use: Park = field(default_factory=Park)

    def __post_init__(self) -> None:
        names = [f"r{rank}" for rank in range(4)]
        self.placement = Planned({name: rank for rank, name in enumerate(names)}, 4)
        self.responses = {name: self._response(name, self.placement.submit(name)) for name in names}
        self.control = StepControl()
        self.control.attach(lambda: list(self.responses.values()), self._move)
        self.releases = ReleaseControl(
            client=self.client,  # type: ignore[arg-type]
            policy=self.policy,
            placement=self.placement,
            prediction=lambda prompt_id: PREDICTION,
            step_time=ModelledTime(NeutralClock()),
            decision_interval_tokens=16,
            use=self.use,
            clock=lambda: self.now_s,
        )

    def _response(self, name: str, dp_rank: int | None, generated: int = 1) -> UnfinishedResponse:
        return UnfinishedResponse(
            response_id=name,
            prompt_id="p",
            dp_rank=dp_rank,
            moves_to=None,
            prompt_tokens=5,
            generated_tokens=generated,
            cap_tokens=1000,
            has_begun=generated > 0,
        )

    def _move(self, name: str, dp_rank: int) -> bool:
        self.moves.append((name, dp_rank))
        return name in self.responses

    def generate(self, name: str, tokens: int) -> None:
        old = self.responses[name]
        self.responses[name] = self._response(name, old.dp_rank, old.generated_tokens + tokens)

    def finish(self, *names: str) -> None:
        for name in names:
            del self.responses[name]
            self.placement.finish(name)

    def look(self, decision: ReleaseDecision | None = None, after_s: float = 1.0) -> list[tuple[int, ...]]:
        """What is asked of the manager now, where the policy has this to say."""
        self.now_s += after_s
        self.policy.next, num_asked = decision, len(self.client.asked)
        self.releases.look(self.control)
        return self.client.asked[num_asked:]


def test_the_policy_is_asked_when_a_rank_has_drained_or_responses_have_grown_and_not_otherwise() -> None:
    step = Step()
    step.look()
    step.look()
    assert len(step.policy.views) == 1
    step.generate("r1", 15)
    step.look()
    assert len(step.policy.views) == 1
    step.generate("r1", 1)
    step.look()
    step.finish("r0")
    step.look()
    assert len(step.policy.views) == 3
    last = step.policy.views[-1]
    assert [len(rank) for rank in last.responses] == [0, 1, 1, 1]
    assert last.responses[1][0].context_tokens == 5 + 17
    # The response that gained most tells how many iterations ran: 1 and then 16.
    assert [view.at_s for view in step.policy.views] == [1.0, 17.0, 17.0]
    assert step.releases.last_reason == "nothing pays"


def test_a_response_that_ends_beside_others_on_its_rank_is_no_news() -> None:
    step = Step()
    step.placement.move("beside", 0)
    step.responses["beside"] = step._response("beside", step.placement.submit("beside"))
    step.look()
    step.finish("beside")
    step.look()
    assert len(step.policy.views) == 1


def test_nothing_is_asked_while_placed_responses_are_not_sent_for_their_rank_would_look_drained() -> None:
    step = Step()
    sent = step.responses["r3"]
    step.responses["r3"] = step._response("r3", None, generated=0)
    assert step.placement.inflight[3] == 1
    step.look()
    assert step.policy.views == []
    step.responses["r3"] = sent
    step.look()
    assert len(step.policy.views[0].responses[3]) == 1


def test_a_response_that_waits_for_a_place_counts_as_queued_where_there_is_most_room() -> None:
    step = Step()
    step.finish("r3")
    step.responses["late"] = step._response("late", None, generated=0)
    step.look()
    (waiting,) = step.policy.views[0].responses[3]
    assert waiting.is_queued


def test_an_order_moves_first_then_releases_and_nothing_is_asked_until_it_is_answered() -> None:
    step = Step()
    step.finish("r3")
    decision = ReleaseDecision(
        leavers=(2, 3), moves=(Move(response_id="r2", source=2, target=0),), reason="why"
    )
    assert step.look(decision) == [(2, 3)]
    assert step.moves == [("r2", 0)]
    step.placement.finish("r2")
    assert step.placement.submit("r2") in (0, 1)
    step.finish("r1")
    assert step.look() == []
    assert len(step.policy.views) == 1
    step.client.answer()
    step.look()
    assert step.releases.left_at_s == {2: step.now_s, 3: step.now_s}
    assert step.policy.views[-1].members == (0, 1)


def test_a_refusal_is_recorded_and_the_ranks_serve_on() -> None:
    step = Step()
    step.finish("r2")
    step.look(ReleaseDecision(leavers=(2,), reason="drained", predicted_gain_s=3.0))
    step.client.answer("the floor is 4")
    step.finish("r1")
    step.look()
    assert step.policy.views[-1].members == (0, 1, 2, 3)
    (record,) = step.releases.decisions(100.0, 110.0)
    assert (record.outcome, record.at_s, record.realised_remaining_s) == ("the floor is 4", 1.0, 9.0)
    assert (record.predicted_gain_s, step.releases.num_refused) == (3.0, 1)


def test_a_response_that_ended_before_its_move_is_not_on_record_as_moved() -> None:
    step = Step()
    step.look()
    move = Move(response_id="r2", source=2, target=0)
    step.finish("r1")
    taken = step.responses.pop("r2")
    step.responses = {"r2": taken, **step.responses}
    step.control.detach()
    step.control.attach(lambda: list(step.responses.values()), lambda name, rank: False)
    step.look(ReleaseDecision(leavers=(2,), moves=(move,), reason="why"))
    assert step.releases.decisions(0.0, 200.0)[0].moves == ()


def test_late_work_brings_a_rank_back_and_its_absence_ends() -> None:
    step = Step()
    step.finish("r2")
    step.look(ReleaseDecision(leavers=(2,), reason="drained"))
    step.client.answer()
    step.look()
    assert step.releases.absences(100.0)[0].to_s is None
    # What another program sends there wakes it; here the first attempt of a response that nobody moved.
    step.placement.set_members(range(4))
    assert step.placement.submit("r2") == 2
    step.look()
    assert step.releases.left_at_s == {}
    assert [(item.from_s, item.to_s) for item in step.releases.absences(100.0)] == [(2.0, 3.0)]


def test_an_order_that_the_end_of_the_step_overtook_says_so() -> None:
    step = Step()
    step.finish("r2")
    step.look(ReleaseDecision(leavers=(2,), reason="drained"))
    (record,) = step.releases.decisions(100.0, 104.0)
    assert record.outcome == "the step ended before it was done"


def test_a_step_may_start_with_fewer_ranks() -> None:
    step = Step()
    step.releases.start_with((0, 1))
    assert step.client.asked == [(2, 3)]
    assert set(step.releases.left_at_s) == {2, 3}
    step.client.refusal = "no"
    other = Step(client=step.client)
    other.releases.start_with((0, 1))
    assert other.releases.left_at_s == {}
    assert other.releases.num_refused == 1


class Upper(Park):
    """Ranks 2 and 3 exit, the others park; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[int, ...]]] = []

    def leave_of(self, ep_rank: int) -> Leave:
        return Leave.exit if ep_rank >= 2 else Leave.park

    def left(self, ep_ranks: tuple[int, ...]) -> None:
        self.told.append(("left", ep_ranks))

    def recall(self, ep_ranks: tuple[int, ...], *, wait: bool) -> None:
        self.told.append(("recall" if wait else "back", ep_ranks))


def test_an_order_is_done_when_those_who_park_and_those_who_exit_have_left() -> None:
    use = Upper()
    step = Step(use=use)
    step.finish("r1", "r2", "r3")
    assert step.look(ReleaseDecision(leavers=(1, 2, 3), reason="drained")) == [(1,), (2, 3)]
    assert step.client.leaves == ["park", "exit"]
    step.client.results.append(_result("operation 1"))
    step.look()
    assert (set(step.releases.left_at_s), step.releases.exited) == ({2, 3}, {2, 3})
    assert step.releases.decisions(100.0, 110.0)[0].outcome == "the step ended before it was done"
    step.client.results.append(_result("operation 0", "the floor is 2"))
    step.look()
    assert set(step.releases.left_at_s) == {2, 3}
    assert step.releases.decisions(100.0, 110.0)[0].outcome == "the floor is 2"
    # Rank 1 stays, so it takes what was planned for a rank that has left; rank 0 has its own.
    assert step.placement.submit("r3") == 1
    asyncio.run(step.releases.rejoin())
    assert use.told == [("left", (2, 3)), ("recall", (2, 3))]
    assert step.releases.last_counters == {2: {"num_iterations": 7}, 3: {}}


def test_a_use_hears_of_a_rank_that_late_work_brought_back() -> None:
    use = Upper()
    step = Step(use=use)
    step.finish("r1")
    step.look(ReleaseDecision(leavers=(1,), reason="drained"))
    step.client.answer()
    step.look()
    step.placement.set_members(range(4))
    assert step.placement.submit("r1") == 1
    step.look()
    assert use.told == [("left", (1,)), ("back", (1,))]


def test_a_response_on_its_way_counts_where_it_goes_and_holds_no_memory_there() -> None:
    step = Step()
    known = step.responses["r2"]
    step.responses["r2"] = UnfinishedResponse(
        **{name: getattr(known, name) for name in known.__slots__ if name != "moves_to"}, moves_to=0
    )
    step.look()
    view = step.policy.views[-1]
    assert [item.response_id for item in view.responses[0]] == ["r0", "r2"]
    assert view.responses[0][1].context_tokens == 0


def test_all_are_brought_back_or_the_reason_is_raised() -> None:
    step = Step()
    asyncio.run(step.releases.rejoin())
    step.client.refusal = "ep_rank 2 is lost"
    with pytest.raises(RuntimeError, match="the ranks that left cannot come back: ep_rank 2 is lost"):
        asyncio.run(step.releases.rejoin())


def test_watching_looks_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_control, "_LOOK_INTERVAL_S", 0.0)
    step = Step()

    async def watch() -> None:
        task = asyncio.create_task(step.releases.watch(step.control))
        while not step.policy.views:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(watch(), 10))


def test_a_rank_that_died_is_away_for_good_and_the_policy_is_asked_when_its_responses_have_left_it() -> None:
    step = Step()
    step.look()
    step.placement.lose(2)
    step.look()
    assert len(step.policy.views) == 1
    # Its response goes on on rank 0.
    step.finish("r2")
    step.responses["r2"] = step._response("r2", step.placement.submit("r2"))
    step.look()
    assert step.policy.views[-1].members == (0, 1, 3)
    assert [len(rank) for rank in step.policy.views[-1].responses] == [2, 1, 0, 1]
    assert step.releases.absences(100.0) == (Absence(dp_rank=2, from_s=2.0, to_s=None),)


def test_the_manager_tells_of_a_death_that_no_response_told_of() -> None:
    use = Upper()
    step = Step(use=use)
    step.client.lost = (1,)
    asyncio.run(step.releases.rejoin())
    assert step.placement.lost == {1}
    assert step.releases.left_at_s.keys() == {1}
    assert use.told == [("recall", ())]
