"""Which ranks are asked to leave as a step runs dry, and what is done with the answers."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.membership.status import OperationResult
from flexfloor.rollout import leaving as leaving_module
from flexfloor.rollout.leaving import Leaving
from flexfloor.scheduling.place import RoundRobin
from flexfloor.scheduling.release import DrainedRelease


class FakeClient:
    """Keeps requests open until the test answers them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.results: list[OperationResult] = []
        self.num_rejoins = 0
        self.rejoin_refusal = ""

    def submit_release(self, ep_ranks: Sequence[int]) -> str:
        self.asked.append(tuple(ep_ranks))
        return f"operation {len(self.asked) - 1}"

    def poll(self) -> list[OperationResult]:
        results, self.results = self.results, []
        return results

    def answer(self, ep_rank: int, refusal: str = "") -> None:
        number = len(self.asked) - 1 - self.asked[::-1].index((ep_rank,))
        self.results.append(result(f"operation {number}", refusal))

    def rejoin(self) -> OperationResult:
        self.num_rejoins += 1
        return result("rejoin", self.rejoin_refusal)


def result(operation_id: str, refusal: str = "") -> OperationResult:
    return OperationResult(operation_id=operation_id, ok=not refusal, reason=refusal, membership_epoch=1)


class Step:
    """Four ranks with one response each, and a clock."""

    def __init__(self, floor: int = 1, hold_s: float = 0.0, num_ranks: int = 4) -> None:
        self.now_s = 100.0
        self.client = FakeClient()
        self.placement = RoundRobin(num_ranks)
        for rank in range(num_ranks):
            assert self.placement.submit(f"r{rank}") == rank
        self.leaving = Leaving(
            client=self.client,  # type: ignore[arg-type]
            release=DrainedRelease(floor=floor, hold_s=hold_s),
            placement=self.placement,
            clock=lambda: self.now_s,
        )

    def finish(self, *ranks: int) -> "Step":
        for rank in ranks:
            self.placement.finish(f"r{rank}")
        return self

    def look(self, after_s: float = 1.0) -> list[tuple[int, ...]]:
        """What is asked now."""
        self.now_s += after_s
        num_asked = len(self.client.asked)
        self.leaving.look()
        return self.client.asked[num_asked:]


def test_nobody_is_asked_while_all_have_work() -> None:
    assert Step().look() == []


def test_a_drained_rank_is_asked_once_and_counts_as_away_when_it_has_left() -> None:
    step = Step().finish(2)
    assert step.look() == [(2,)]
    assert step.look() == []
    assert step.leaving.left_at_s == {}
    step.client.answer(2)
    assert step.look() == []
    assert step.leaving.left_at_s == {2: 103.0}
    assert step.look() == []


def test_ranks_are_asked_one_by_one_down_to_the_floor() -> None:
    step = Step(floor=2).finish(1)
    assert step.look() == [(1,)]
    step.finish(0, 3)
    # 1 is on its way out, so one more may go; the one that has been idle longest, then the lowest.
    assert step.look() == [(0,)]
    step.client.answer(1)
    step.client.answer(0)
    assert step.look() == []
    assert set(step.leaving.left_at_s) == {0, 1}


def test_a_rank_is_kept_for_a_while_where_that_is_asked_for() -> None:
    step = Step(hold_s=5.0).finish(3)
    assert step.look() == []
    assert step.look(after_s=4.5) == []
    assert step.look(after_s=0.5) == [(3,)]


def test_at_the_end_of_the_step_nobody_leaves_any_more() -> None:
    assert Step().finish(0, 1, 2, 3).look() == []


def test_a_refusal_is_counted_and_the_rank_may_be_asked_again() -> None:
    step = Step().finish(2)
    step.look()
    step.client.answer(2, "the floor is 4")
    assert step.look() == [(2,)]
    assert (step.leaving.num_refused, step.leaving.left_at_s) == (1, {})


def test_a_rank_that_got_late_work_is_back_and_stays() -> None:
    step = Step().finish(2)
    step.look()
    step.client.answer(2)
    step.look()
    # Round robin starts over with rank 0; the third one after it is for rank 2.
    late = [step.placement.submit(f"late {number}") for number in range(3)]
    assert late == [0, 1, 2]
    assert step.look() == []
    assert step.leaving.left_at_s == {}
    step.placement.finish("late 2")
    assert step.look() == []


def test_work_that_came_before_the_answer_counts_too() -> None:
    step = Step().finish(0)
    step.look()
    assert step.placement.submit("late") == 0
    step.client.answer(0)
    step.look()
    step.look()
    assert step.leaving.left_at_s == {}


def test_answers_to_others_are_not_ours() -> None:
    step = Step()
    step.client.results.append(result("another driver's"))
    assert step.look() == []
    assert step.leaving.left_at_s == {}


@given(
    st.integers(1, 4),
    st.permutations(range(4)),
    st.lists(st.tuples(st.sampled_from(["finish", "yes", "no", "look"]), st.integers(0, 3)), max_size=40),
)
def test_the_floor_holds_whatever_finishes_and_whatever_is_answered(
    floor: int, order: list[int], moves: list[tuple[str, int]]
) -> None:
    step, pending, unanswered = Step(floor=floor), list(order), list[int]()
    for move, number in moves:
        if move == "finish" and pending:
            step.finish(pending.pop())
        elif move in ("yes", "no") and unanswered:
            rank = unanswered.pop(number % len(unanswered))
            step.client.answer(rank, "" if move == "yes" else "no")
        before = set(step.leaving.left_at_s)
        asked = [rank for (rank,) in step.look()]
        unanswered += asked
        assert all(step.placement.inflight[rank] == 0 for rank in asked)
        assert before <= set(step.leaving.left_at_s)
        gone = {*unanswered, *step.leaving.left_at_s}
        assert len(gone) == len(unanswered) + len(step.leaving.left_at_s)
        assert 4 - len(gone) >= floor


def test_all_are_brought_back_or_the_reason_is_raised() -> None:
    step = Step()
    asyncio.run(step.leaving.rejoin())
    assert step.client.num_rejoins == 1
    step.client.rejoin_refusal = "ep_rank 2 is lost"
    with pytest.raises(RuntimeError, match="the ranks that left cannot come back: ep_rank 2 is lost"):
        asyncio.run(step.leaving.rejoin())


def test_watching_looks_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_module, "_LOOK_INTERVAL_S", 0.0)
    step = Step().finish(2)

    async def watch() -> None:
        task = asyncio.create_task(step.leaving.watch())
        while not step.client.asked:
            await asyncio.sleep(0)
        step.client.answer(2)
        while not step.leaving.left_at_s:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(watch(), 10))
    assert set(step.leaving.left_at_s) == {2}
