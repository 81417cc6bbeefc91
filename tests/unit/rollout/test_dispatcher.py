"""One step through a fake engine that aborts, drops, stalls, repeats and lies."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Fault, SlowEngine, true_draw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexfloor.errors import LedgerError, StaleWeightsError
from flexfloor.rollout.dispatcher import run_step
from flexfloor.rollout.engine import AttemptsExhausted, EngineRefused
from flexfloor.rollout.ledger import Ledger, read_ledger
from flexfloor.rollout.step import RolloutResult, StepLimits, StepProgress
from flexfloor.scheduling.place import LeastInflight, PlacementPolicy, RoundRobin
from flexfloor.types import FinishReason, Response, ResponseRequest

LIMITS = StepLimits(context_tokens=200, response_timeout_s=0.05, max_attempts=3, retry_backoff_s=0.0)


def make_requests(groups: Sequence[int], budget: int = 40) -> list[ResponseRequest]:
    """`groups[i]` responses of prompt i, whose prompt has i + 2 tokens."""
    return [
        ResponseRequest(
            response_id=f"4/p{prompt}/{sample}",
            rollout_step=4,
            prompt_id=f"p{prompt}",
            sample_index=sample,
            prompt_token_ids=tuple(range(prompt + 2)),
            max_response_tokens=budget,
            sampling_seed=100 * prompt + sample,
        )
        for prompt, size in enumerate(groups)
        for sample in range(size)
    ]


def make_engine(requests: Sequence[ResponseRequest], lengths: Sequence[int], **kwargs: Any) -> FakeEngine:
    """Lengths repeat when there are fewer of them than requests."""
    return FakeEngine(
        lengths={r.response_id: lengths[i % len(lengths)] for i, r in enumerate(requests)},
        prompt_tokens={r.response_id: len(r.prompt_token_ids) for r in requests},
        **kwargs,
    )


def run(
    requests: Sequence[ResponseRequest],
    engine: FakeEngine,
    path: Path,
    placement: PlacementPolicy | None = None,
    limits: StepLimits = LIMITS,
    **kwargs: Any,
) -> RolloutResult:
    async def step() -> RolloutResult:
        with Ledger.open(path, rollout_step=4, weight_version=7, num_responses=len(requests)) as ledger:
            return await run_step(
                requests,
                engine=engine,
                placement=placement or RoundRobin(4),
                ledger=ledger,
                weight_version=7,
                limits=limits,
                **kwargs,
            )

    return asyncio.run(asyncio.wait_for(step(), timeout=20))


def check_complete(
    requests: Sequence[ResponseRequest], engine: FakeEngine, result: RolloutResult, path: Path
) -> None:
    """Each response once, its tokens those of an undisturbed draw, and the same on disk."""
    assert [r.response_id for r in result.responses] == [r.response_id for r in requests]
    for request, response in zip(requests, result.responses, strict=True):
        num_tokens = min(engine.lengths[request.response_id], LIMITS.cap_tokens(request))
        assert (response.token_ids, response.logprobs) == true_draw(request, num_tokens)
    read = read_ledger(path)
    read.state.validate()
    on_disk = {response.response_id: response for response in read.state.finished_responses()}
    assert on_disk == {response.response_id: response for response in result.responses}
    assert read.torn_bytes == 0
    assert engine.faults_done == set(engine.faults)
    assert engine.num_open == 0


def test_a_quiet_step_is_even_in_order_and_counted(tmp_path: Path) -> None:
    requests = make_requests([3, 3, 3, 1])
    engine, seen = make_engine(requests, [5, 1, 9]), list[Response]()
    result = run(requests, engine, tmp_path / "l", on_response=seen.append)
    check_complete(requests, engine, result, tmp_path / "l")
    assert engine.calls == [(r.response_id, i % 4, 1) for i, r in enumerate(requests)]
    assert Counter(r.dp_rank for r in result.responses) == {0: 3, 1: 3, 2: 2, 3: 2}
    assert sorted(seen, key=lambda r: r.response_id) == sorted(result.responses, key=lambda r: r.response_id)
    assert (result.num_retries, result.num_duplicates, result.num_late, result.num_resumed) == (0, 0, 0, 0)
    assert all(result.started_at_s <= r.started_at_s <= r.finished_at_s for r in seen)
    assert max(r.finished_at_s for r in seen) <= result.finished_at_s


def test_more_ranks_than_responses(tmp_path: Path) -> None:
    requests = make_requests([2])
    engine = make_engine(requests, [4])
    result = run(requests, engine, tmp_path / "l", RoundRobin(8))
    check_complete(requests, engine, result, tmp_path / "l")
    assert [r.dp_rank for r in result.responses] == [0, 1]


def test_no_requests_make_an_empty_step(tmp_path: Path) -> None:
    assert run([], make_engine([], [1]), tmp_path / "l").responses == ()


@pytest.mark.parametrize("kind", ["abort", "lost", "silent", "cut", "logprobs", "too_many"])
@pytest.mark.parametrize("after_chunks", [0, 2])
def test_a_lost_attempt_is_continued_to_the_same_response(
    tmp_path: Path, kind: str, after_chunks: int
) -> None:
    requests = make_requests([2, 2])
    hurt = requests[1].response_id
    engine = make_engine(requests, [11, 20], faults={(hurt, 1): Fault(kind=kind, after_chunks=after_chunks)})
    result = run(requests, engine, tmp_path / "l")
    check_complete(requests, engine, result, tmp_path / "l")
    assert [r.num_attempts for r in result.responses] == [1, 2, 1, 1]
    assert result.num_retries == 1
    assert engine.calls[-1] == (hurt, 0, 2)  # the fifth submission of a round robin over four ranks
    assert result.responses[1].dp_rank == 0


def test_an_attempt_that_broke_off_at_the_cap_is_truncated_without_another_request(tmp_path: Path) -> None:
    requests = make_requests([1], budget=6)
    engine = make_engine(requests, [50])
    engine.faults = {(requests[0].response_id, 1): Fault(kind="unmarked", after_chunks=1)}
    result = run(requests, engine, tmp_path / "l")
    assert result.responses[0].token_ids == true_draw(requests[0], 6)[0]
    assert result.responses[0].finish_reason is FinishReason.length
    assert [call[2] for call in engine.calls] == [1]


def test_truncation_names_the_cap_that_bound(tmp_path: Path) -> None:
    tight = StepLimits(context_tokens=30, response_timeout_s=1, max_attempts=1)
    by_budget, by_context = make_requests([1], budget=9), make_requests([1, 1], budget=99)[1:]
    requests = [*by_budget, *by_context]
    engine = make_engine(requests, [500])
    first, second = run(requests, engine, tmp_path / "l", limits=tight).responses
    assert (first.num_tokens, first.cap_tokens, first.is_truncated) == (9, 9, True)
    # 30 tokens of context, 3 of prompt, 6 reserved by the engine.
    assert (second.num_tokens, second.cap_tokens, second.is_truncated) == (21, 21, True)


def test_a_response_that_stops_at_its_cap_is_not_truncated(tmp_path: Path) -> None:
    requests = make_requests([1], budget=9)
    (response,) = run(requests, make_engine(requests, [9]), tmp_path / "l").responses
    assert (response.num_tokens, response.cap_tokens, response.is_truncated) == (9, 9, False)


@pytest.mark.parametrize(("kind", "counts"), [("twice", (1, 1)), ("chatter", (0, 1))])
def test_what_comes_after_the_finish_is_dropped_and_counted(
    tmp_path: Path, kind: str, counts: tuple[int, int]
) -> None:
    requests = make_requests([2])
    seen: list[Response] = []
    engine = make_engine(requests, [5], faults={(requests[0].response_id, 1): Fault(kind=kind)})
    result = run(requests, engine, tmp_path / "l", on_response=seen.append)
    check_complete(requests, engine, result, tmp_path / "l")
    assert (result.num_duplicates, result.num_late) == counts
    assert len(seen) == 2


def test_another_weight_version_ends_the_step(tmp_path: Path) -> None:
    requests = make_requests([3])
    engine = make_engine(requests, [30], faults={(requests[1].response_id, 1): Fault(kind="stale")})
    with pytest.raises(StaleWeightsError, match=r"4/p0/1 comes from weight_version 6.*runs on 7"):
        run(requests, engine, tmp_path / "l")
    assert engine.num_aborts == 1
    assert engine.num_open == 0
    assert read_ledger(tmp_path / "l").state.num_finished == 0


def test_a_refused_request_ends_the_step_at_once(tmp_path: Path) -> None:
    requests = make_requests([3])
    engine = make_engine(requests, [30], faults={(requests[2].response_id, 1): Fault(kind="refused")})
    with pytest.raises(EngineRefused, match="too long"):
        run(requests, engine, tmp_path / "l")
    assert len(engine.calls) == 3


def test_attempts_run_out_with_the_story_of_each(tmp_path: Path) -> None:
    requests = make_requests([1])
    name = requests[0].response_id
    faults = {(name, n): Fault(kind=kind) for n, kind in enumerate(("lost", "abort", "silent"), start=1)}
    engine = make_engine(requests, [40], faults=faults)
    with pytest.raises(AttemptsExhausted) as caught:
        run(requests, engine, tmp_path / "l")
    story = (
        "dp_rank 0: connection reset; dp_rank 1: aborted by the engine: paused; dp_rank 2: silent for 0.05 s"
    )
    assert str(caught.value) == f"response {name} was lost 3 times: {story}"
    kept = read_ledger(tmp_path / "l").state.responses[name]
    assert tuple(kept.token_ids) == true_draw(requests[0], 9)[0]  # one chunk of each attempt


def test_silence_does_not_count_while_the_rank_is_busy_with_others(tmp_path: Path) -> None:
    requests = make_requests([2])
    queued, busy = requests[0].response_id, requests[1].response_id
    engine = make_engine(requests, [4])
    engine.lengths[busy] = 150 * 3

    async def step() -> RolloutResult:
        engine.gates[queued] = asyncio.Event()
        limits = StepLimits(context_tokens=900, response_timeout_s=0.2, max_attempts=1)
        loop = asyncio.get_running_loop()

        def open_gate_late(progress: StepProgress) -> None:
            if loop.time() - started_at_s > 0.5:
                engine.gates[queued].set()

        with Ledger.open(tmp_path / "l", rollout_step=4, weight_version=7, num_responses=2) as ledger:
            started_at_s = loop.time()
            return await run_step(
                make_requests([2], budget=800),
                engine=SlowEngine(engine, busy, 0.005),
                placement=RoundRobin(1),
                ledger=ledger,
                weight_version=7,
                limits=limits,
                on_progress=open_gate_late,
                progress_interval_s=0.0,
            )

    result = asyncio.run(step())
    waited_s = result.responses[0].finished_at_s - result.responses[0].started_at_s
    assert waited_s > 0.5
    assert [r.num_attempts for r in result.responses] == [1, 1]


def test_held_back_responses_go_to_the_rank_that_gets_free(tmp_path: Path) -> None:
    requests = make_requests([6])
    engine = make_engine(requests, [30, 1, 1, 1, 1, 1])
    result = run(requests, engine, tmp_path / "l", LeastInflight(2, running_limit=1))
    check_complete(requests, engine, result, tmp_path / "l")
    assert [r.dp_rank for r in result.responses] == [0, 1, 1, 1, 1, 1]
    assert [call[0] for call in engine.calls] == [r.response_id for r in requests]


def test_a_lost_response_goes_before_those_that_never_ran(tmp_path: Path) -> None:
    requests = make_requests([4])
    hurt = requests[0].response_id
    engine = make_engine(requests, [9], faults={(hurt, 1): Fault(kind="abort")})
    result = run(requests, engine, tmp_path / "l", LeastInflight(2, running_limit=1))
    check_complete(requests, engine, result, tmp_path / "l")
    names = [call[0] for call in engine.calls]
    # The place that it gave up goes to the next in line; then it is first.
    assert names == [requests[i].response_id for i in (0, 1, 2, 0, 3)]


def test_cancelling_aborts_the_engine_and_keeps_the_tokens(tmp_path: Path) -> None:
    requests = make_requests([2])
    faults = {(requests[0].response_id, 1): Fault(kind="silent", after_chunks=2)}
    engine = make_engine(requests, [30], faults=faults)

    async def step() -> None:
        finished = asyncio.Event()
        with Ledger.open(tmp_path / "l", rollout_step=4, weight_version=7, num_responses=2) as ledger:
            task = asyncio.create_task(
                run_step(
                    requests,
                    engine=engine,
                    placement=RoundRobin(2),
                    ledger=ledger,
                    weight_version=7,
                    limits=StepLimits(context_tokens=200, response_timeout_s=60, max_attempts=3),
                    on_response=lambda _: finished.set(),
                )
            )
            await asyncio.wait_for(finished.wait(), timeout=5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(step())
    assert (engine.num_aborts, engine.num_open) == (1, 0)
    state = read_ledger(tmp_path / "l").state
    assert tuple(state.responses[requests[0].response_id].token_ids) == true_draw(requests[0], 6)[0]
    assert [r.response_id for r in state.finished_responses()] == [requests[1].response_id]


def test_a_step_resumes_where_its_ledger_ends(tmp_path: Path) -> None:
    requests = make_requests([3])
    faults = {(requests[1].response_id, 1): Fault(kind="refused", after_chunks=3)}
    first = make_engine(requests, [2, 30, 30], faults=faults)
    with pytest.raises(EngineRefused):
        run(requests, first, tmp_path / "l")
    again, seen = make_engine(requests, [2, 30, 30]), list[Response]()
    result = run(requests, again, tmp_path / "l", on_response=seen.append)
    check_complete(requests, again, result, tmp_path / "l")
    assert (result.num_resumed, len(seen)) == (1, 3)
    assert [(call[0], call[2]) for call in again.calls] == [(r.response_id, 2) for r in requests[1:]]


@pytest.mark.parametrize(
    "change", [{"sampling_seed": 5}, {"prompt_token_ids": (9, 9)}, {"response_id": "4/q/0"}]
)
def test_a_step_does_not_go_on_from_the_ledger_of_another_run(tmp_path: Path, change: dict[str, Any]) -> None:
    requests = make_requests([1])
    run(requests, make_engine(requests, [3]), tmp_path / "l")
    others = [replace(requests[0], **change)]
    with pytest.raises(LedgerError, match="4/p0/0 is not one of this step"):
        run(others, make_engine(others, [3]), tmp_path / "l")


def test_a_failing_callback_ends_the_step(tmp_path: Path) -> None:
    requests = make_requests([4])
    engine = make_engine(requests, [3])

    def fail(_: Response) -> None:
        raise RuntimeError("the reward pool is gone")

    with pytest.raises(RuntimeError, match="the reward pool is gone"):
        run(requests, engine, tmp_path / "l", on_response=fail)
    assert engine.num_open == 0


def test_progress_ends_at_the_full_count(tmp_path: Path) -> None:
    requests, seen = make_requests([5]), list[StepProgress]()
    engine = make_engine(requests, [7])
    run(requests, engine, tmp_path / "l", on_progress=seen.append, progress_interval_s=0.0)
    assert seen[-1] == StepProgress(num_responses=5, num_finished=5, num_tokens=35, inflight=(0, 0, 0, 0))
    assert [p.num_tokens for p in seen] == sorted(p.num_tokens for p in seen)
    assert seen[0].num_tokens == 3


def test_twins_and_prompts_without_room_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    requests = make_requests([2])
    engine = make_engine(requests, [3])
    with pytest.raises(ValueError, match="3 requests, but only 2 different response_ids"):
        run([*requests, requests[0]], engine, tmp_path / "l")
    tight = StepLimits(context_tokens=8, response_timeout_s=1, max_attempts=1)
    with pytest.raises(ValueError, match="2 prompt tokens leave no room in a context of 8"):
        run(requests, engine, tmp_path / "m", limits=tight)
    assert engine.calls == []


def test_a_ledger_of_another_step_is_refused(tmp_path: Path) -> None:
    requests = make_requests([1])
    with Ledger.open(tmp_path / "l", rollout_step=3, weight_version=7, num_responses=1):
        pass
    with pytest.raises(LedgerError, match=r"=\(3, 7, 1\), not \(4, 7, 1\)"):
        run(requests, make_engine(requests, [1]), tmp_path / "l")


FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(["abort", "lost", "cut", "logprobs", "too_many", "twice", "chatter"]),
    after_chunks=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    num_ranks=st.integers(1, 6),
    limit=st.none() | st.integers(1, 2),
    faults=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 2), FAULTS), max_size=12),
)
def test_every_interleaving_gives_each_response_exactly_once(
    groups: list[int],
    lengths: list[int],
    num_ranks: int,
    limit: int | None,
    faults: list[tuple[int, int, Fault]],
) -> None:
    requests = make_requests(groups)
    engine = make_engine(requests, lengths)
    engine.faults = {(requests[i % len(requests)].response_id, n): fault for i, n, fault in faults}
    seen: list[Response] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "l"
        policy = RoundRobin(num_ranks) if limit is None else LeastInflight(num_ranks, limit)
        result = run(requests, engine, path, policy, on_response=seen.append)
        engine.faults = {key: fault for key, fault in engine.faults.items() if key in engine.faults_done}
        check_complete(requests, engine, result, path)
    assert Counter(r.response_id for r in seen) == {r.response_id: 1 for r in requests}
    assert policy.inflight == (0,) * num_ranks
