"""Moves of a running step: the response goes on elsewhere, whole, and it is no loss."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Fault, true_draw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_dispatcher import LIMITS, check_complete, make_engine, make_requests, run

from flexfloor.errors import FlexfloorError
from flexfloor.records import Aborted, moved_reason
from flexfloor.rollout.control import StepControl
from flexfloor.rollout.engine import AttemptsExhausted
from flexfloor.rollout.ledger import read_ledger
from flexfloor.rollout.step import StepLimits, StepProgress
from flexfloor.scheduling.place import LeastInflight, Planned, RoundRobin

Orders = Callable[[StepControl], None]


def once(when: Callable[[StepControl], bool], order: Orders, control: StepControl) -> dict[str, Any]:
    """Arguments of `run` that give the order at the first progress at which `when` holds."""
    done: list[bool] = []

    def look(_: StepProgress) -> None:
        if not done and when(control):
            done.append(True)
            order(control)

    return {"control": control, "on_progress": look, "progress_interval_s": 0.0}


def has_tokens(name: str, least: int = 3) -> Callable[[StepControl], bool]:
    return lambda control: any(
        r.response_id == name and r.generated_tokens >= least for r in control.unfinished()
    )


def test_a_moved_response_goes_on_with_all_its_tokens(tmp_path: Path) -> None:
    requests = make_requests([4])
    name = requests[1].response_id
    engine, control = make_engine(requests, [20]), StepControl()
    order = once(has_tokens(name), lambda c: assert_true(c.move(name, 3)), control)
    result = run(requests, engine, tmp_path / "l", RoundRobin(4), **order)
    check_complete(requests, engine, result, tmp_path / "l")
    assert engine.calls[4:] == [(name, 3, 2)]
    assert engine.aborted == [name]
    assert [r.dp_rank for r in result.responses] == [0, 3, 2, 3]
    assert (result.num_moves, result.num_retries, result.num_late) == (1, 0, 0)
    state = read_ledger(tmp_path / "l").state
    assert (state.num_moves, state.num_retries) == (1, 0)


def assert_true(value: bool) -> None:
    assert value


def test_tokens_that_come_with_the_abort_are_kept_and_not_drawn_again(tmp_path: Path) -> None:
    requests = make_requests([1])
    name = requests[0].response_id
    seen: list[int] = []

    class Counting(FakeEngine):
        def generate_stream(self, request: Any, **kwargs: Any) -> Any:
            seen.append(len(request.prompt_token_ids))
            return super().generate_stream(request, **kwargs)

    engine = Counting(lengths={name: 20}, prompt_tokens={name: 2})
    order = once(has_tokens(name), lambda c: assert_true(c.move(name, 1)), StepControl())
    result = run(requests, engine, tmp_path / "l", RoundRobin(2), **order)
    assert result.responses[0].token_ids == true_draw(requests[0], 20)[0]
    # 2 tokens of prompt, whole chunks of 3, and 2 of the chunk that the abort cut short.
    assert seen[0] == 2
    assert (seen[1] - 2) % 3 == 2


def test_the_ledger_says_where_it_went(tmp_path: Path) -> None:
    record = Aborted("4/p0/0", 1, 0, 1.0, 5, moved_reason(3))
    assert (record.reason, record.moved_to) == ("moved to dp_rank 3", 3)
    assert Aborted("4/p0/0", 1, 0, 1.0, 5, "silent for 3 s").moved_to is None


def test_moves_are_no_attempts_that_were_lost(tmp_path: Path) -> None:
    requests = make_requests([1])
    name = requests[0].response_id
    engine, control = make_engine(requests, [40]), StepControl()
    limits = StepLimits(context_tokens=200, response_timeout_s=1, max_attempts=1, retry_backoff_s=60.0)

    def go_round(_: StepProgress) -> None:
        for response in control.unfinished():
            if response.has_begun and response.moves_to is None and response.dp_rank is not None:
                assert control.move(name, (response.dp_rank + 1) % 4)

    result = run(
        requests,
        engine,
        tmp_path / "l",
        limits=limits,
        control=control,
        on_progress=go_round,
        progress_interval_s=0.0,
    )
    assert result.responses[0].token_ids == true_draw(requests[0], 40)[0]
    assert result.num_moves >= 3
    assert [rank for _, rank, _ in engine.calls] == [n % 4 for n in range(result.num_moves + 1)]


def test_a_response_that_finishes_first_is_finished_and_stays_where_it_was(tmp_path: Path) -> None:
    requests = make_requests([2])
    name = requests[0].response_id
    engine = make_engine(requests, [20], is_deaf=True)
    order = once(has_tokens(name), lambda c: assert_true(c.move(name, 1)), StepControl())
    result = run(requests, engine, tmp_path / "l", RoundRobin(2), **order)
    check_complete(requests, engine, result, tmp_path / "l")
    assert (result.num_moves, result.responses[0].dp_rank, engine.aborted) == (0, 0, [name])


def test_an_abort_that_the_engine_missed_is_repeated(tmp_path: Path) -> None:
    requests = make_requests([1])
    name = requests[0].response_id

    control = StepControl()

    class Forgetful(FakeEngine):
        def generate_stream(self, request: Any, **kwargs: Any) -> Any:
            # Held back until the second abort, which also ends it.
            gate = self.gates.setdefault(name, asyncio.Event())
            asyncio.get_running_loop().call_soon(lambda: gate.is_set() or control.move(name, 1))
            return super().generate_stream(request, **kwargs)

        async def abort(self, response_id: str | None = None) -> None:
            self.is_deaf = not self.aborted
            await super().abort(response_id)
            if self.is_deaf:
                raise FlexfloorError("the first one never arrives")
            self.gates[name].set()

    engine = Forgetful(lengths={name: 20}, prompt_tokens={name: 2})
    limits = StepLimits(context_tokens=200, response_timeout_s=5, max_attempts=1)
    result = run(requests, engine, tmp_path / "l", RoundRobin(2), limits=limits, control=control)
    assert engine.aborted == [name, name]
    assert (result.num_moves, result.responses[0].dp_rank) == (1, 1)


def test_a_loss_under_way_is_a_loss_and_goes_on_where_it_was_sent(tmp_path: Path) -> None:
    requests = make_requests([1])
    name = requests[0].response_id
    engine = make_engine(requests, [20], is_deaf=True)
    engine.faults = {(name, 1): Fault(kind="lost", after_chunks=2)}
    order = once(has_tokens(name), lambda c: assert_true(c.move(name, 2)), StepControl())
    result = run(requests, engine, tmp_path / "l", RoundRobin(4), **order)
    check_complete(requests, engine, result, tmp_path / "l")
    assert [call[1] for call in engine.calls] == [0, 2]
    assert (result.num_moves, result.num_retries) == (0, 1)
    strict = StepLimits(context_tokens=200, response_timeout_s=1, max_attempts=1)
    again = make_engine(requests, [20], is_deaf=True, faults=engine.faults)
    with pytest.raises(AttemptsExhausted, match="was lost 1 times: dp_rank 0: connection reset"):
        run(requests, again, tmp_path / "m", RoundRobin(4), limits=strict, **order)


def test_one_that_waits_is_redirected(tmp_path: Path) -> None:
    requests = make_requests([3])
    waiting = requests[2].response_id
    engine, control = make_engine(requests, [9]), StepControl()

    def order(control: StepControl) -> None:
        assert [(r.dp_rank, r.has_begun) for r in control.unfinished()] == [
            (0, True),
            (1, False),
            (None, False),
        ]
        assert control.move(waiting, 0)
        assert control.move(waiting, 1)

    orders = once(lambda _: True, order, control)
    result = run(requests, engine, tmp_path / "l", LeastInflight(2, running_limit=1), **orders)
    assert engine.calls[2] == (waiting, 1, 1)
    assert (result.num_moves, engine.aborted) == (0, [])


def test_a_later_order_replaces_the_first_and_may_mean_to_stay(tmp_path: Path) -> None:
    requests = make_requests([1])
    name = requests[0].response_id
    for target in (2, 0):

        def order(control: StepControl, target: int = target) -> None:
            assert control.move(name, 3)
            assert control.move(name, target)
            (response,) = control.unfinished()
            assert (response.dp_rank, response.moves_to) == (0, target)

        engine = make_engine(requests, [20])
        orders = once(has_tokens(name), order, StepControl())
        result = run(requests, engine, tmp_path / f"l{target}", RoundRobin(4), **orders)
        assert [call[1] for call in engine.calls] == [0, target]
        assert engine.aborted == [name]
        assert result.responses[0].token_ids == true_draw(requests[0], 20)[0]


def test_a_response_whose_abort_brings_its_last_token_needs_no_other_rank(tmp_path: Path) -> None:
    requests = make_requests([1], budget=9)
    name = requests[0].response_id
    engine = make_engine(requests, [50], late_tokens=3)
    order = once(has_tokens(name, 6), lambda c: assert_true(c.move(name, 1)), StepControl())
    result = run(requests, engine, tmp_path / "l", RoundRobin(2), **order)
    (response,) = result.responses
    assert (response.num_tokens, response.is_truncated, response.dp_rank) == (9, True, 0)
    assert (len(engine.calls), result.num_moves) == (1, 0)


def test_orders_that_mean_nothing_and_orders_that_make_no_sense(tmp_path: Path) -> None:
    requests = make_requests([2])
    long, short = requests[0].response_id, requests[1].response_id
    engine, control = make_engine(requests, [20, 1]), StepControl()
    assert not control.move(long, 1)
    assert control.unfinished() == []

    def order(control: StepControl) -> None:
        assert [r.response_id for r in control.unfinished()] == [long]
        assert not control.move(short, 0)  # it has finished
        assert not control.move(long, 0)  # it is there
        with pytest.raises(ValueError, match="4/q/0 is not one of this step"):
            control.move("4/q/0", 1)
        with pytest.raises(ValueError, match="dp_rank=2: the group has 2 ranks"):
            control.move(long, 2)

    order_once = once(has_tokens(long, 6), order, control)
    result = run(requests, engine, tmp_path / "l", RoundRobin(2), **order_once)
    assert (engine.aborted, result.num_moves) == ([], 0)
    assert control.unfinished() == []
    assert not control.move(long, 1)


def test_the_view_counts_all_attempts_and_knows_what_may_be_queued(tmp_path: Path) -> None:
    requests = make_requests([1], budget=30)
    name = requests[0].response_id
    engine, control, views = make_engine(requests, [20]), StepControl(), []

    def look(_: StepProgress) -> None:
        views.extend(control.unfinished())
        if len(views) == 1:
            control.move(name, 1)
            views.extend(control.unfinished())

    run(
        requests,
        engine,
        tmp_path / "l",
        RoundRobin(2),
        control=control,
        on_progress=look,
        progress_interval_s=0.0,
    )
    first, ordered = views[:2]
    assert (first.prompt_id, first.prompt_tokens, first.cap_tokens) == ("p0", 2, 30)
    assert (first.dp_rank, first.moves_to, first.generated_tokens, first.has_begun) == (0, None, 3, True)
    assert (ordered.dp_rank, ordered.moves_to) == (0, 1)
    assert views[-1].dp_rank == 1
    assert [v.generated_tokens for v in views] == sorted(v.generated_tokens for v in views)


MOVES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=25)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    limit=st.none() | st.integers(1, 2),
    moves=MOVES,
    late_tokens=st.integers(0, 3),
    faults=st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["lost", "cut", "abort"])), max_size=2),
)
def test_any_moves_give_each_response_once_and_whole(
    groups: list[int],
    lengths: list[int],
    limit: int | None,
    moves: list[tuple[int, int]],
    late_tokens: int,
    faults: list[tuple[int, str]],
) -> None:
    requests = make_requests(groups)
    names = [request.response_id for request in requests]
    engine = make_engine(requests, lengths, late_tokens=late_tokens)
    engine.faults = {(names[i % len(names)], 1): Fault(kind=kind) for i, kind in faults}
    control, orders = StepControl(), list(moves)

    def give_orders(_: StepProgress) -> None:
        for index, dp_rank in (orders.pop() for _ in range(min(2, len(orders)))):
            control.move(names[index % len(names)], dp_rank)

    ranks = {name: index % 4 for index, name in enumerate(names)}
    policy = Planned(ranks, 4) if limit is None else LeastInflight(4, limit)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "l"
        result = run(
            requests,
            engine,
            path,
            policy,
            LIMITS,
            control=control,
            on_progress=give_orders,
            progress_interval_s=0.0,
        )
        engine.faults = {key: fault for key, fault in engine.faults.items() if key in engine.faults_done}
        check_complete(requests, engine, result, path)
    assert policy.inflight == (0, 0, 0, 0)
    attempts = sum(response.num_attempts - 1 for response in result.responses)
    assert result.num_moves + result.num_retries == attempts
