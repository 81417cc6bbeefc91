"""A rank dies in mid-step: its responses go on elsewhere, and nothing goes to it any more."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, true_draw

from flexfloor.rollout.dispatcher import run_step
from flexfloor.rollout.engine import Chunk
from flexfloor.rollout.ledger import Ledger
from flexfloor.rollout.step import RolloutResult, StepLimits
from flexfloor.scheduling.place import LeastInflight, Planned, RoundRobin
from flexfloor.types import FinishReason, ResponseRequest

LIMITS = StepLimits(context_tokens=96, response_timeout_s=5.0, max_attempts=2)
NUM_RANKS = 4


class DyingRanks:
    """Passes an engine's chunks on until a rank has sent so many; then it is dead, as the server says it."""

    def __init__(self, engine: FakeEngine, dies_after_chunks: dict[int, int]) -> None:
        self._engine = engine
        self._left = dies_after_chunks
        self.refused: list[int] = []
        """Ranks that were dead already when a request came for them."""
        self.asked: list[int] = []

    async def generate_stream(
        self, request: ResponseRequest, *, dp_rank: int, attempt: int
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append(dp_rank)
        if self._left.get(dp_rank, 1) <= 0:
            self.refused.append(dp_rank)
        async for chunk in self._engine.generate_stream(request, dp_rank=dp_rank, attempt=attempt):
            if self._left.get(dp_rank, 1) <= 0:
                yield self._death(dp_rank)
                return
            if dp_rank in self._left:
                self._left[dp_rank] -= 1
            yield chunk

    async def abort(self, response_id: str | None = None) -> None:
        await self._engine.abort(response_id)

    def _death(self, dp_rank: int) -> Chunk:
        return Chunk(
            token_ids=[],
            logprobs=[],
            weight_version=7,
            finish_reason=FinishReason.abort,
            message=f"flexfloor: dp rank {dp_rank} lost",
        )


def requests_of(count: int) -> list[ResponseRequest]:
    return [
        ResponseRequest(
            response_id=f"4/p/{index}",
            rollout_step=4,
            prompt_id="p",
            sample_index=index,
            prompt_token_ids=(1, 2, 3),
            max_response_tokens=40,
            sampling_seed=index,
        )
        for index in range(count)
    ]


def run(
    requests: list[ResponseRequest],
    engine: DyingRanks,
    placement: RoundRobin | LeastInflight | Planned,
    path: Path,
) -> RolloutResult:
    async def step() -> RolloutResult:
        with Ledger.open(path, rollout_step=4, weight_version=7, num_responses=len(requests)) as ledger:
            return await run_step(
                requests, engine=engine, placement=placement, ledger=ledger, weight_version=7, limits=LIMITS
            )

    return asyncio.run(asyncio.wait_for(step(), timeout=20))


@pytest.mark.parametrize("dies_after_chunks", [{2: 0}, {2: 5}, {0: 3, 3: 1}, {0: 2, 1: 4, 3: 0}])
@pytest.mark.parametrize("policy", ["round_robin", "least", "planned"])
def test_responses_of_dead_ranks_are_what_they_would_have_been(
    tmp_path: Path, dies_after_chunks: dict[int, int], policy: str
) -> None:
    requests = requests_of(12)
    fake = FakeEngine(
        lengths={request.response_id: 9 + 2 * index for index, request in enumerate(requests)},
        prompt_tokens={request.response_id: 3 for request in requests},
    )
    placement = {
        "round_robin": RoundRobin(NUM_RANKS),
        "least": LeastInflight(NUM_RANKS, running_limit=2),
        "planned": Planned(
            {request.response_id: index % NUM_RANKS for index, request in enumerate(requests)}, NUM_RANKS
        ),
    }[policy]
    dead = frozenset(dies_after_chunks)
    engine = DyingRanks(fake, dict(dies_after_chunks))
    result = run(requests, engine, placement, tmp_path / "l")
    assert placement.lost == dead
    for request, response in zip(requests, result.responses, strict=True):
        assert (response.token_ids, response.logprobs) == true_draw(
            request, fake.lengths[request.response_id]
        )
    # Once for each response that was on it when it died; nobody comes after that.
    assert len(engine.asked) == len(requests) + result.num_retries
    assert result.num_retries >= len(dead)
    assert placement.inflight == (0,) * NUM_RANKS


def test_deaths_do_not_count_as_attempts(tmp_path: Path) -> None:
    """Three ranks die under one response, which has two attempts."""
    requests = requests_of(1)
    fake = FakeEngine(lengths={"4/p/0": 30}, prompt_tokens={"4/p/0": 3})
    engine = DyingRanks(fake, {0: 1, 1: 1, 2: 1})
    result = run(requests, engine, LeastInflight(NUM_RANKS), tmp_path / "l")
    assert (result.responses[0].dp_rank, result.num_retries) == (3, 3)
    assert result.responses[0].token_ids == true_draw(requests[0], 30)[0]
    assert engine.asked == [0, 1, 2, 3]


def test_a_lost_rank_is_no_member_whoever_names_it() -> None:
    placement = LeastInflight(3)
    placement.lose(1)
    placement.set_members((0, 1))
    assert [placement.submit(f"r{number}") for number in range(2)] == [0, 0]
    # The only member dies: whoever is alive serves.
    placement.lose(0)
    assert placement.submit("r2") == 2
    with pytest.raises(ValueError, match="all 3 ranks"):
        placement.lose(2)
