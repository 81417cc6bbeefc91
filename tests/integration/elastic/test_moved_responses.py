"""Responses that move between ranks of a real server in mid-response, and the log of its iterations."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rollouts import MAX_LOGPROB_DIFFERENCE
from server import Server
from shared_server import SharedServer

from flexfloor.iterations import StepIterations
from flexfloor.membership.client import DriverClient
from flexfloor.rollout.control import StepControl
from flexfloor.rollout.dispatcher import run_step
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.iteration_log import read_step
from flexfloor.rollout.ledger import Ledger, read_ledger
from flexfloor.rollout.step import RolloutResult, StepLimits
from flexfloor.scheduling.place import Planned
from flexfloor.types import FinishReason, ResponseRequest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Controller = Callable[[StepControl], Awaitable[None]]

NUM_RANKS = 4
PROMPT_TOKENS = 8
LIMITS = StepLimits(context_tokens=512, response_timeout_s=60.0, max_attempts=2)
LENGTHS = ((40, 90, 25), (60, 30, 45), (16, 50, 33), (12, 24, 70))
"""By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A step that has run."""

    result: RolloutResult
    iterations: StepIterations
    worker_iterations: int
    """By the server's own counters."""

    @property
    def num_decode_tokens(self) -> int:
        """Tokens but for the first one of each response, which its prefill makes."""
        return sum(response.num_tokens - 1 for response in self.result.responses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Steps on one server."""

    url: str
    log_folder: Path
    ledger_folder: Path

    def run(self, controller: Controller | None = None, *, is_forced: bool = True) -> Ran:
        """Always the same requests. Forced responses are greedy and have the lengths above; the others are
        samples that end where they will."""
        return asyncio.run(self._run(requests_of(seed=1), controller, is_forced))

    async def _run(
        self, requests: Sequence[ResponseRequest], controller: Controller | None, is_forced: bool
    ) -> Ran:
        path = self.ledger_folder / f"{len(list(self.ledger_folder.iterdir()))}.ledger"
        temperature = 0.0 if is_forced else 1.0
        async with EngineClient(self.url, temperature=temperature, ignore_eos=is_forced) as engine:
            await engine.flush_cache()
            version, before = await engine.weight_version(), await engine.counters()
            with Ledger.open(
                path, rollout_step=0, weight_version=version, num_responses=len(requests)
            ) as ledger:
                control = StepControl()
                step = run_step(
                    requests,
                    engine=engine,
                    placement=Planned(dict(map(planned, requests)), NUM_RANKS),
                    ledger=ledger,
                    weight_version=version,
                    limits=LIMITS,
                    control=control,
                )
                steering = controller(control) if controller else asyncio.sleep(0)
                result, _ = await asyncio.gather(step, steering)
            after = await engine.counters()
        state = read_ledger(path).state
        state.validate()
        assert set(state.finished_responses()) == set(result.responses)
        assert (result.num_retries, result.num_duplicates, result.num_late) == (0, 0, 0)
        return Ran(
            result=result,
            iterations=read_step(self.log_folder, before, after),
            worker_iterations=sum(after.num_iterations) - sum(before.num_iterations),
        )


def requests_of(seed: int) -> list[ResponseRequest]:
    generator = np.random.default_rng(seed)
    return [
        ResponseRequest(
            response_id=f"0/p{dp_rank}/{index}",
            rollout_step=0,
            prompt_id=f"p{dp_rank}",
            sample_index=index,
            prompt_token_ids=tuple(int(token) for token in generator.integers(4, 32, PROMPT_TOKENS)),
            max_response_tokens=length,
            sampling_seed=100 * seed + 10 * dp_rank + index,
        )
        for dp_rank, own in enumerate(LENGTHS)
        for index, length in enumerate(own)
    ]


def planned(request: ResponseRequest) -> tuple[str, int]:
    return request.response_id, int(request.prompt_id.removeprefix("p"))


@pytest.fixture(scope="module")
def rollouts(
    loaded_server: Server, shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory
) -> Rollouts:
    return Rollouts(
        url=loaded_server.url,
        log_folder=shared_server.iteration_log_folder,
        ledger_folder=tmp_path_factory.mktemp("ledgers"),
    )


@pytest.fixture(scope="module")
def forced(rollouts: Rollouts) -> Ran:
    """Nothing moves."""
    return rollouts.run()


@pytest.fixture(scope="module")
def sampled(rollouts: Rollouts) -> Ran:
    """Nothing moves."""
    return rollouts.run(is_forced=False)


def moving(at_tokens: int) -> Controller:
    """Send each response on to the next rank, again and again after so many tokens more."""

    async def steer(control: StepControl) -> None:
        next_at: dict[str, int] = {}
        await until(lambda: bool(control.unfinished()))
        while unfinished := control.unfinished():
            for place, response in enumerate(unfinished):
                due = next_at.setdefault(response.response_id, at_tokens + 3 * place)
                if response.dp_rank is None or response.generated_tokens < due:
                    continue
                if control.move(response.response_id, (response.dp_rank + 1) % NUM_RANKS):
                    next_at[response.response_id] = response.generated_tokens + at_tokens
            await asyncio.sleep(0.005)

    return steer


async def until(is_so: Callable[[], bool], deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not is_so():
            await asyncio.sleep(0.005)


def assert_same_responses(oracle: RolloutResult, moved: RolloutResult) -> None:
    assert [r.response_id for r in moved.responses] == [r.response_id for r in oracle.responses]
    for expected, response in zip(oracle.responses, moved.responses, strict=True):
        assert response.token_ids == expected.token_ids, response.response_id
        assert response.logprobs == pytest.approx(expected.logprobs, abs=MAX_LOGPROB_DIFFERENCE)
        assert response.finish_reason is expected.finish_reason


def test_the_log_of_a_quiet_step_has_every_token(forced: Ran) -> None:
    responses, rows = forced.result.responses, forced.iterations
    assert [r.num_tokens for r in responses] == [length for own in LENGTHS for length in own]
    assert forced.result.num_moves == 0
    assert rows.is_member.all()
    assert rows.worker_iterations == forced.worker_iterations
    # A response of L tokens takes one prefill and L - 1 decode iterations where the engine sees its end come.
    assert rows.num_running.sum() == forced.num_decode_tokens
    assert rows.prefill_tokens.sum() == PROMPT_TOKENS * len(responses)
    # A decode iteration attends to the prompt and to all tokens before the one that it makes.
    contexts = [range(PROMPT_TOKENS + 1, PROMPT_TOKENS + r.num_tokens) for r in responses]
    assert rows.context_tokens.sum() == sum(map(sum, contexts))
    longest = max(r.num_tokens for r in responses)
    num_prefill_rows = int((rows.prefill_tokens.sum(axis=1) > 0).sum())
    # While a rank prefills its other responses wait.
    assert longest <= rows.num_iterations <= longest + num_prefill_rows
    assert rows.seconds is not None
    assert 0 < rows.seconds.sum() < 1.2 * (forced.result.finished_at_s - forced.result.started_at_s)


def test_a_response_that_stops_by_itself_takes_one_iteration_more(sampled: Ran) -> None:
    num_stopped = sum(r.finish_reason is FinishReason.stop for r in sampled.result.responses)
    num_more = int(sampled.iterations.num_running.sum()) - sampled.num_decode_tokens
    # None more where its rank ran a prefill next.
    assert 0 < num_more <= num_stopped


def test_moved_greedy_responses_are_those_that_stayed(rollouts: Rollouts, forced: Ran) -> None:
    moved = rollouts.run(moving(7))
    assert moved.result.num_moves >= 8
    assert_same_responses(forced.result, moved.result)
    assert [r.dp_rank for r in moved.result.responses] != [r.dp_rank for r in forced.result.responses]
    assert moved.iterations.worker_iterations == moved.worker_iterations
    # The token of the abort is drawn again, in the prefill on the new rank; one more was launched in vain.
    num_more = int(moved.iterations.num_running.sum()) - moved.num_decode_tokens
    assert 0 <= num_more <= moved.result.num_moves


def test_moved_samples_are_those_that_stayed(rollouts: Rollouts, sampled: Ran) -> None:
    moved = rollouts.run(moving(3), is_forced=False)
    assert moved.result.num_moves >= 4
    assert_same_responses(sampled.result, moved.result)


def test_a_rank_is_emptied_by_moves_leaves_and_returns(
    rollouts: Rollouts, forced: Ran, client: DriverClient
) -> None:

    async def steer(control: StepControl) -> None:
        await until(lambda: any(r.generated_tokens > 5 for r in control.unfinished()))
        for target, response in enumerate(r for r in control.unfinished() if r.dp_rank == 3):
            assert control.move(response.response_id, target)
        left = await asyncio.to_thread(client.release, [3])
        assert left.ok, left.reason
        assert {r.dp_rank for r in control.unfinished()} <= {0, 1, 2}
        left_at = longest_of(control)
        await until(lambda: longest_of(control) > left_at + 5)
        assert (await asyncio.to_thread(client.rejoin)).ok
        assert longest_of(control) < 90, "the step ended before the rank was back"

    ran = rollouts.run(steer)
    assert_same_responses(forced.result, ran.result)
    rows = ran.iterations
    assert rows.worker_iterations == ran.worker_iterations
    away = ~rows.is_member[:, 3]
    assert rows.is_member[:, :3].all()
    assert rows.num_switches == 2
    assert 5 <= away.sum() < rows.num_iterations
    assert not rows.num_running[away, 3].any()
    assert rows.num_iterations * NUM_RANKS - rows.worker_iterations == away.sum()
    assert 0 <= int(rows.num_running.sum()) - ran.num_decode_tokens <= ran.result.num_moves


def longest_of(control: StepControl) -> int:
    """Tokens of the longest response so far."""
    return max((r.generated_tokens for r in control.unfinished()), default=90)
