"""Whole passes over a trace under one way of scheduling, priced by a clock. PURE.

Batching, plan and release are the live system's own code. It is told what that code would know: predictions
from the passes before, the group, the time on the policy's clock. The truth decides when responses end and
what an iteration costs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexfloor.config.choices import Batching, Placement, StartingSize
from flexfloor.scheduling.batch import plan_window
from flexfloor.scheduling.clocks import CorrectedClock
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.plan import PlannedResponse, StepPlan, plan_step
from flexfloor.scheduling.pricing import price
from flexfloor.scheduling.release import GUARDED, AllowedSets, CostBasedRelease, ReleaseProfile
from flexfloor.simulate.engine import Limits, Observe, SimulatedResponse, StepOutcome, simulate_step
from flexfloor.simulate.forecast import Drawn, Forecast, Knowledge
from flexfloor.simulate.results import ScenarioResult, StepResult
from flexfloor.simulate.traces import Trace


def _no_bound(num_members: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The group of ranks, and what its time is priced by."""

    num_ranks: int
    floor: int
    clock: Clock
    """The truth."""
    policy_clock: Clock | None = None
    """What plan and release price in, corrected by what the run's iterations took so far; None: the truth."""
    running_limit_per_rank: int = 256
    kv_tokens: Callable[[int], int | None] = _no_bound
    """KV pool of a rank in tokens, by the number of members."""
    allowed_sizes: tuple[int, ...] | None = None
    """Sizes that the group may have; None: any from the floor on."""
    member_sets: tuple[tuple[int, ...], ...] | None = None
    """The only sets besides all that it may shrink to, as where each is prepared ahead; None: any."""
    decision_interval_iterations: int = 16
    extra_iterations_after_end: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(
            running_limit_per_rank=self.running_limit_per_rank,
            kv_tokens=self.kv_tokens,
            decision_interval_iterations=self.decision_interval_iterations,
            extra_iterations_after_end=self.extra_iterations_after_end,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way of scheduling."""

    name: str
    batching: Batching = Batching.fifo
    placement: Placement = Placement.round_robin
    starting_size: StartingSize = StartingSize.full
    release: ReleaseProfile | None = None
    """None: a static group."""
    num_ranks: int | None = None
    """A smaller group from the start and for good, as a control; None: all of the machine."""
    window_steps: int = 4
    min_rank_correlation: float = 0.3

    @property
    def profile(self) -> ReleaseProfile:
        return self.release or GUARDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is drawn, how much of it is counted, and what is known of it."""

    trace: Trace
    num_prompts_per_step: int
    num_history_passes: int
    """Passes at the start that only teach the predictor."""
    knowledge: Knowledge = Knowledge.history
    noise_sd: float = 0.0
    seed: int = 0
    """Of the data's order, of windows and plans."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_history_passes < self.trace.num_passes:
            raise ValueError(
                f"num_history_passes={self.num_history_passes}: the trace has {self.trace.num_passes} passes "
                f"and one must be left to be counted"
            )
        if self.num_prompts_per_step < 1:
            raise ValueError(f"num_prompts_per_step={self.num_prompts_per_step}: at least 1")

    def order(self, pass_index: int) -> list[int]:
        """Prompt indices as the data loader yields them."""
        rng = np.random.default_rng([self.seed, pass_index])
        return [int(index) for index in rng.permutation(self.trace.num_prompts)]


def run_scenario(workload: Workload, scheme: Scheme, machine: Machine) -> ScenarioResult:
    """Every counted step of the trace; the passes before it run in data order and are only learned from."""
    return _Run(workload, scheme, machine).result()


@dataclass
class _Run:
    workload: Workload
    scheme: Scheme
    machine: Machine
    forecast: Forecast = field(init=False)
    num_ranks: int = field(init=False)
    policy_clock: Clock = field(init=False)
    corrected: CorrectedClock | None = None
    rollout_step: int = 0

    def __post_init__(self) -> None:
        workload = self.workload
        self.forecast = Forecast(
            workload.trace, workload.knowledge, noise_sd=workload.noise_sd, seed=workload.seed
        )
        self.num_ranks = self.scheme.num_ranks or self.machine.num_ranks
        if self.machine.policy_clock is not None:
            self.corrected = CorrectedClock(clock=self.machine.policy_clock)
        self.policy_clock = self.corrected or self.machine.clock

    @property
    def floor(self) -> int:
        is_static = self.scheme.release is None and self.scheme.starting_size is StartingSize.full
        return self.num_ranks if is_static else min(self.machine.floor, self.num_ranks)

    @property
    def _is_baseline(self) -> bool:
        """Then a plan costs time and changes nothing."""
        scheme = self.scheme
        return scheme.placement is Placement.round_robin and scheme.starting_size is StartingSize.full

    def result(self) -> ScenarioResult:
        steps: list[StepResult] = []
        for pass_index in range(self.workload.trace.num_passes):
            self.forecast.begin_pass(pass_index)
            if pass_index < self.workload.num_history_passes:
                self._learn(pass_index)
            else:
                steps += self._pass(pass_index)
        return ScenarioResult(scheme=self.scheme.name, num_ranks=self.num_ranks, steps=tuple(steps))

    def _learn(self, pass_index: int) -> None:
        prompts, size = self.workload.order(pass_index), self.workload.num_prompts_per_step
        for begin in range(0, len(prompts), size):
            self._observe(self._drawn(pass_index, prompts[begin : begin + size]))

    def _pass(self, pass_index: int) -> Iterator[StepResult]:
        prompts = self.workload.order(pass_index)
        window_size = self.scheme.window_steps * self.workload.num_prompts_per_step
        for begin in range(0, len(prompts), window_size):
            yield from self._window(pass_index, prompts[begin : begin + window_size], begin)

    def _window(self, pass_index: int, prompts: Sequence[int], begin: int) -> Iterator[StepResult]:
        trace, pool = self.workload.trace, self.machine.kv_tokens(self.num_ranks)
        plan = plan_window(
            prompts,
            batch_size=self.workload.num_prompts_per_step,
            predictions=self.forecast.of_prompt,
            prompt_tokens=lambda index: int(trace.prompt_tokens[index]),
            num_responses_per_prompt=trace.num_responses_per_prompt,
            kv_capacity_tokens=None if pool is None else pool * self.num_ranks,
            mode=self.scheme.batching,
            rank_correlation=self.forecast.rank_correlation,
            min_rank_correlation=self.scheme.min_rank_correlation,
            seed=self.workload.seed,
            window_index=pass_index * trace.num_prompts + begin,
            running_limit=self.machine.running_limit_per_rank * self.num_ranks,
        )
        for turn, batch in enumerate(plan.batches):
            drawn = self._drawn(pass_index, batch)
            reason = plan.batch_reasons[turn] if plan.batch_reasons else plan.reason
            yield self._step(drawn, reason)
            self._observe(drawn)

    def _drawn(self, pass_index: int, prompts: Sequence[int]) -> list[Drawn]:
        lengths = self.workload.trace.lengths[pass_index]
        return [
            Drawn(prompt_index=index, lengths=tuple(int(length) for length in lengths[index]))
            for index in prompts
        ]

    def _observe(self, drawn: Sequence[Drawn]) -> None:
        self.forecast.observe(self.rollout_step, drawn)
        self.rollout_step += 1

    def _step(self, drawn: Sequence[Drawn], batching_reason: str) -> StepResult:
        responses = self._responses(drawn)
        plan = self._plan(responses)
        ordered = [responses[response_id] for response_id in plan.order]
        release = self._release()
        outcome = simulate_step(
            ordered,
            plan.policy(num_ranks=self.num_ranks, running_limit_per_rank=self.machine.running_limit_per_rank),
            members=plan.members,
            limits=self.machine.limits,
            release=release,
            policy_clock=self.machine.policy_clock or self.machine.clock,
            truth_clock=self.machine.clock,
            observe=self._observer(release),
        )
        return self._priced(plan, outcome, drawn, batching_reason)

    def _responses(self, drawn: Sequence[Drawn]) -> dict[str, SimulatedResponse]:
        trace = self.workload.trace
        responses = (
            SimulatedResponse(
                response_id=f"{one.prompt_index}/{sample}",
                prompt_tokens=int(trace.prompt_tokens[one.prompt_index]),
                num_tokens=length,
                max_new_tokens=trace.cap_tokens,
                prediction=prediction,
            )
            for one in drawn
            for sample, (length, prediction) in enumerate(
                zip(one.lengths, self._predictions(one), strict=True)
            )
        )
        return {response.response_id: response for response in responses}

    def _predictions(self, one: Drawn) -> list[LengthPrediction]:
        if self.forecast.knows_responses:
            return [self.forecast.of_response(one.prompt_index, length) for length in one.lengths]
        return [self.forecast.of_prompt(one.prompt_index)] * len(one.lengths)

    def _plan(self, responses: dict[str, SimulatedResponse]) -> StepPlan:
        profile = self.scheme.profile
        # A response is its own prompt here: the oracle knows each of them, the others predict by prompt.
        return plan_step(
            [
                PlannedResponse(response_id=name, prompt_id=name, prompt_tokens=response.prompt_tokens)
                for name, response in responses.items()
            ],
            {} if self._is_baseline else {name: each.prediction for name, each in responses.items()},
            num_ranks=self.num_ranks,
            placement=self.scheme.placement,
            clock=self.policy_clock,
            kv_tokens=self.machine.kv_tokens,
            running_limit_per_rank=self.machine.running_limit_per_rank,
            price=profile.price,
            wall_budget=float("inf") if profile.wall_budget is None else profile.wall_budget,
            floor=self.floor,
            allowed_sizes=self._allowed_sizes(),
            starting_size=self.scheme.starting_size,
            seed=self.workload.seed,
        )

    def _release(self) -> CostBasedRelease | None:
        if self.scheme.release is None:
            return None
        return CostBasedRelease(
            clock=self.policy_clock,
            num_ranks=self.num_ranks,
            floor=self.floor,
            profile=self.scheme.release,
            allowed=self._allowed(),
            kv_tokens=self.machine.kv_tokens,
        )

    def _observer(self, release: CostBasedRelease | None) -> Observe | None:
        """As live: what iterations took corrects the clock, and the policy is told how wrong it was."""
        corrected = self.corrected
        if release is None or corrected is None:
            return None

        def observe(*, num_ranks: int, predicted_s: float, observed_s: float) -> None:
            expected_s = corrected.corrected_s(num_ranks, predicted_s)
            release.observe(predicted_s=expected_s, observed_s=observed_s)
            corrected.observe(num_ranks=num_ranks, predicted_s=predicted_s, observed_s=observed_s)

        return observe

    def _allowed(self) -> AllowedSets:
        if self.machine.member_sets is not None:
            return AllowedSets.of_members(self._member_sets())
        sizes = self._allowed_sizes()
        return AllowedSets.any() if sizes is None else AllowedSets.of_sizes(sizes)

    def _member_sets(self) -> list[tuple[int, ...]]:
        sets = self.machine.member_sets or ()
        return [one for one in sets if max(one) < self.num_ranks] + [tuple(range(self.num_ranks))]

    def _allowed_sizes(self) -> tuple[int, ...] | None:
        if self.machine.member_sets is not None:
            return tuple({len(one) for one in self._member_sets()})
        sizes = self.machine.allowed_sizes
        if sizes is None:
            return None
        return tuple({*(size for size in sizes if size <= self.num_ranks), self.num_ranks})

    def _priced(
        self, plan: StepPlan, outcome: StepOutcome, drawn: Sequence[Drawn], batching_reason: str
    ) -> StepResult:
        priced = price(outcome.iterations, self.machine.clock, full_size=self.num_ranks)
        rows = outcome.iterations
        return StepResult(
            num_responses=sum(len(one.lengths) for one in drawn),
            num_tokens=sum(sum(one.lengths) for one in drawn),
            longest_tokens=max(max(one.lengths) for one in drawn),
            num_iterations=rows.num_iterations,
            worker_iterations=rows.worker_iterations,
            idle_worker_iterations=rows.idle_worker_iterations,
            wall_s=priced.wall_s,
            occupied_worker_s=priced.occupied_worker_s,
            num_switches=priced.num_switches,
            num_moves=len(outcome.moves),
            num_retractions=outcome.num_retractions,
            num_refused=outcome.num_refused,
            starting_size=len(plan.members),
            batching_reason=batching_reason,
            placement=plan.placement,
            placement_reason=plan.reason,
            decisions=outcome.decisions,
        )
