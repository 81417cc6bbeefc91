"""A rollout step on a real 4-rank server: placement, ledger, counters, faults and continuation."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from flexfloor.rollout.dispatcher import run_step
from flexfloor.rollout.engine import Chunk, EngineRefused, ResponseLost
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.ledger import Ledger, read_ledger
from flexfloor.rollout.occupancy import Occupancy, measure
from flexfloor.rollout.step import RolloutResult, StepLimits
from flexfloor.scheduling.place import LeastInflight, PlacementPolicy, RoundRobin
from flexfloor.types import ResponseRequest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NUM_RANKS = 4
LIMITS = StepLimits(context_tokens=512, response_timeout_s=60.0, max_attempts=3)

# 10 prompts x 3 with a long tail: most caps are short, one response in ten may be long.
REQUESTS = [
    ResponseRequest(
        response_id=f"0/p{prompt}/{sample}",
        rollout_step=0,
        prompt_id=f"p{prompt}",
        sample_index=sample,
        prompt_token_ids=tuple(4 + (prompt * 7 + i * 5) % 28 for i in range(3 + prompt)),
        max_response_tokens=90 if (3 * prompt + sample) % 10 == 9 else 6 + 2 * prompt,
        sampling_seed=1000 + 10 * prompt + sample,
    )
    for prompt in range(10)
    for sample in range(3)
]


class MeddlingEngine(EngineClient):
    """The real client, whose responses are aborted or cut off once, after their first chunks."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.abort_ids: set[str] = set()
        self.cut_ids: set[str] = set()
        self.num_aborted = 0
        self.num_cut = 0

    async def generate_stream(
        self, request: ResponseRequest, *, dp_rank: int, attempt: int
    ) -> AsyncGenerator[Chunk, None]:
        name = request.response_id
        async for chunk in super().generate_stream(request, dp_rank=dp_rank, attempt=attempt):
            yield chunk
            if name in self.abort_ids and chunk.finish_reason is None:
                self.abort_ids.remove(name)
                self.num_aborted += 1
                await self.abort(name)
            if name in self.cut_ids and chunk.finish_reason is None:
                self.cut_ids.remove(name)
                self.num_cut += 1
                raise ResponseLost("cut off by the test")


async def step(
    engine: EngineClient, requests: list[ResponseRequest], path: Path, placement: PlacementPolicy
) -> tuple[RolloutResult, Occupancy]:
    version = await engine.weight_version()
    with Ledger.open(path, rollout_step=0, weight_version=version, num_responses=len(requests)) as ledger:
        before = await engine.counters()
        result = await run_step(
            requests,
            engine=engine,
            placement=placement,
            ledger=ledger,
            weight_version=version,
            limits=LIMITS,
        )
        after = await engine.counters()
    occupancy = measure(
        result.responses,
        started_at_s=result.started_at_s,
        finished_at_s=result.finished_at_s,
        num_ranks=NUM_RANKS,
        counters_before=before,
        counters_after=after,
    )
    return result, occupancy


def run(url: str, requests: list[ResponseRequest], path: Path, placement: PlacementPolicy) -> RolloutResult:
    async def go() -> RolloutResult:
        async with EngineClient(url) as engine:
            return (await step(engine, requests, path, placement))[0]

    return asyncio.run(go())


@pytest.fixture(scope="module")
def quiet(
    shared_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RolloutResult, Occupancy, Path]:
    """An undisturbed round-robin step."""
    path = tmp_path_factory.mktemp("quiet") / "l"

    async def go() -> tuple[RolloutResult, Occupancy]:
        async with EngineClient(shared_server_url) as engine:
            return await step(engine, REQUESTS, path, RoundRobin(NUM_RANKS))

    return *asyncio.run(go()), path


def tokens(result: RolloutResult) -> list[tuple[int, ...]]:
    return [response.token_ids for response in result.responses]


def test_every_response_once_evenly_placed_and_in_the_ledger(
    quiet: tuple[RolloutResult, Occupancy, Path],
) -> None:
    result, _, path = quiet
    assert [r.response_id for r in result.responses] == [r.response_id for r in REQUESTS]
    assert Counter(r.dp_rank for r in result.responses) == {0: 8, 1: 8, 2: 7, 3: 7}
    assert [r.dp_rank for r in result.responses] == [i % NUM_RANKS for i in range(len(REQUESTS))]
    for request, response in zip(REQUESTS, result.responses, strict=True):
        assert 1 <= response.num_tokens <= request.max_response_tokens
        assert response.is_truncated == (response.token_ids[-1] != 2)
        assert response.cap_tokens == request.max_response_tokens
        assert all(logprob <= 0 for logprob in response.logprobs)
        assert len(response.logprobs) == response.num_tokens
    assert any(r.is_truncated for r in result.responses)
    read = read_ledger(path)
    read.state.validate()
    assert set(read.state.finished_responses()) == set(result.responses)
    assert (result.num_retries, result.num_duplicates, result.num_late, read.torn_bytes) == (0, 0, 0, 0)


def test_counters_of_a_static_step_fit_its_longest_response(
    quiet: tuple[RolloutResult, Occupancy, Path],
) -> None:
    result, occupancy, _ = quiet
    longest = max(r.num_tokens for r in result.responses)
    iterations = occupancy.iterations
    assert iterations is not None
    assert iterations.worker_iterations % NUM_RANKS == 0
    # Prefill samples the first token; a few more iterations are further prefills and the overlap's last pass.
    assert longest <= iterations.worker_iterations // NUM_RANKS <= longest + 40
    assert 0 < iterations.idle_worker_iterations < iterations.worker_iterations
    assert 0 < occupancy.tail_idle_share < 1
    assert occupancy.occupied_worker_s == pytest.approx(NUM_RANKS * occupancy.wall_s)


def test_placement_does_not_change_what_is_drawn(
    shared_server_url: str, quiet: tuple[RolloutResult, Occupancy, Path], tmp_path: Path
) -> None:
    again = run(shared_server_url, REQUESTS, tmp_path / "l", LeastInflight(NUM_RANKS, running_limit=2))
    assert [r.dp_rank for r in again.responses] != [r.dp_rank for r in quiet[0].responses]
    assert tokens(again) == tokens(quiet[0])


def test_aborted_and_cut_responses_are_continued_to_the_same_tokens(
    shared_server_url: str, quiet: tuple[RolloutResult, Occupancy, Path], tmp_path: Path
) -> None:
    longest_first = sorted(quiet[0].responses, key=lambda r: -r.num_tokens)
    requests = {request.response_id: request for request in REQUESTS}
    chosen = [requests[r.response_id] for r in longest_first[:6]]

    async def go() -> tuple[RolloutResult, MeddlingEngine]:
        async with MeddlingEngine(shared_server_url) as engine:
            engine.abort_ids = {request.response_id for request in chosen[:2]}
            engine.cut_ids = {request.response_id for request in chosen[2:4]}
            return (await step(engine, chosen, tmp_path / "l", RoundRobin(NUM_RANKS)))[0], engine

    result, engine = asyncio.run(go())
    assert (engine.num_aborted, engine.num_cut) == (2, 2)
    assert [r.num_attempts for r in result.responses] == [2, 2, 2, 2, 1, 1]
    undisturbed = {r.response_id: r for r in quiet[0].responses}
    for response in result.responses:
        expected = undisturbed[response.response_id]
        assert response.token_ids == expected.token_ids
        assert response.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert response.finish_reason is expected.finish_reason


def test_a_cancelled_step_leaves_an_idle_engine_and_resumes(
    shared_server_url: str, quiet: tuple[RolloutResult, Occupancy, Path], tmp_path: Path
) -> None:
    async def interrupt() -> None:
        async with EngineClient(shared_server_url) as engine:
            first = asyncio.Event()
            version = await engine.weight_version()
            with Ledger.open(
                tmp_path / "l", rollout_step=0, weight_version=version, num_responses=len(REQUESTS)
            ) as ledger:
                task = asyncio.create_task(
                    run_step(
                        REQUESTS,
                        engine=engine,
                        placement=RoundRobin(NUM_RANKS),
                        ledger=ledger,
                        weight_version=version,
                        limits=LIMITS,
                        on_response=lambda _: first.set(),
                    )
                )
                await asyncio.wait_for(first.wait(), timeout=60)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await engine.flush_cache()  # fails while a request is running

    asyncio.run(interrupt())
    kept = read_ledger(tmp_path / "l").state
    assert 0 < kept.num_finished < len(REQUESTS)
    resumed = run(shared_server_url, REQUESTS, tmp_path / "l", RoundRobin(NUM_RANKS))
    assert resumed.num_resumed == kept.num_finished
    assert tokens(resumed) == tokens(quiet[0])


def test_the_cap_of_the_context_binds_where_we_say(shared_server_url: str, tmp_path: Path) -> None:
    """A prompt that leaves room for one token is accepted, and one that is a token longer is not."""
    long = replace(REQUESTS[0], prompt_token_ids=(9,) * 505, max_response_tokens=99)
    (response,) = run(shared_server_url, [long], tmp_path / "l", RoundRobin(NUM_RANKS)).responses
    assert (response.cap_tokens, response.num_tokens) == (512 - 6 - 505, 1)
    too_long = replace(long, prompt_token_ids=(9,) * 506, max_response_tokens=1)

    async def ask() -> list[Chunk]:
        async with EngineClient(shared_server_url) as engine:
            return [chunk async for chunk in engine.generate_stream(too_long, dp_rank=0, attempt=1)]

    with pytest.raises(EngineRefused, match="506 tokens"):
        asyncio.run(ask())
