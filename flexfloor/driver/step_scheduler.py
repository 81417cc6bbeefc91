"""Which prompts a rollout step takes, where their responses go, and what the step taught about lengths.

One pass over the prompts after the other, each cut into windows of a few steps; within a window the batching
policy decides. A window's plan is written down when it begins, so that a run that goes on in mid-window takes
the very prompts that are left.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexfloor.config.scheduling import SchedulingConfig
from flexfloor.data.order import PromptOrder
from flexfloor.rollout.step_time import ModelledTime, StepTime, WallTime
from flexfloor.schedule_record import PlannedPrompt
from flexfloor.scheduling.batch import WindowPlan, plan_window
from flexfloor.scheduling.calibration import calibration
from flexfloor.scheduling.clocks import CorrectedClock
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.decision import ReleasePolicy
from flexfloor.scheduling.history import LengthHistory
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.observation import observation_of
from flexfloor.scheduling.place import PlacementPolicy, running_limit_per_rank
from flexfloor.scheduling.plan import PlannedResponse, StepPlan, plan_step
from flexfloor.scheduling.predict import Predictor
from flexfloor.scheduling.profiles import profile_of
from flexfloor.scheduling.release import AllowedSets, CostBasedRelease, ReleaseProfile
from flexfloor.types import Response, ResponseRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrompt:
    """What scheduling needs of a prompt."""

    prompt_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Prompts of one step, as indices, and why these."""

    indices: tuple[int, ...]
    reason: str
    is_bucketed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutShape:
    """The fixed sizes that plans are made for."""

    num_ranks: int
    batch_size: int
    """Prompt groups of a step."""
    num_responses_per_prompt: int
    max_response_tokens: int
    max_running_requests: int
    """Of the whole group; the engine divides it by the ranks."""
    floor: int
    """`num_ranks` for a static group."""
    member_sets: tuple[tuple[int, ...], ...] = ()
    """Sets that the server prepared; empty: any."""

    @property
    def running_limit_per_rank(self) -> int:
        return running_limit_per_rank(self.max_running_requests, self.num_ranks)

    @property
    def allowed_sizes(self) -> tuple[int, ...] | None:
        return (
            tuple(sorted({len(members) for members in self.member_sets} | {self.num_ranks}))
            if (self.member_sets)
            else None
        )


class StepScheduler:
    """The scheduling side of one run.

    Args:
        kv_tokens: of one rank, by the number of members; None where nothing bounds it.
        folder: where window plans are kept; None keeps them in memory.
        clock: a CorrectedClock is taken to price this very machine: its seconds are those on the wall.
        run_id: names this run in the history; the same after a restart.
        first_step: what the history holds of this run from there on is about to be drawn again.
    """

    def __init__(
        self,
        scheduling: SchedulingConfig,
        shape: RolloutShape,
        *,
        prompts: Sequence[KnownPrompt],
        order: PromptOrder,
        history: LengthHistory,
        dataset: str,
        run_id: str,
        clock: Clock,
        kv_tokens: Callable[[int], int | None],
        seed: int,
        folder: Path | None = None,
        first_step: int = 0,
    ) -> None:
        self._scheduling = scheduling
        self._shape = shape
        self._prompts = prompts
        self._order = order
        self._history = history
        self._dataset = dataset
        self._run_id = run_id
        self._clock = clock
        self._kv_tokens = kv_tokens
        self._seed = seed
        self._folder = folder
        known = history.read(dataset, resume=(run_id, first_step))
        self._predictor = Predictor.from_history(known, cap_tokens=shape.max_response_tokens)
        self._windows: dict[tuple[int, int], WindowPlan] = {}
        self._expected: dict[str, LengthPrediction] = {}
        self._num_seen: dict[str, float] = {}

    @property
    def profile(self) -> ReleaseProfile:
        return profile_of(self._scheduling)

    @property
    def clock(self) -> Clock:
        return self._clock

    def batch(self, step: int) -> StepBatch:
        """The prompts of a step. Asked for in any order, also again."""
        size = self._shape.batch_size
        per_pass = self._order.steps_per_pass(size)
        pass_index, step_in_pass = divmod(step, per_pass)
        window_index, step_in_window = divmod(step_in_pass, self._scheduling.window_steps)
        plan = self._window(pass_index, window_index, per_pass)
        reasons = plan.batch_reasons
        return StepBatch(
            indices=plan.batches[step_in_window],
            reason=reasons[step_in_window] if reasons else plan.reason,
            is_bucketed=plan.is_bucketed,
        )

    @property
    def steps_per_pass(self) -> int:
        return self._order.steps_per_pass(self._shape.batch_size)

    def open_windows(self, step: int) -> dict[str, Any]:
        """By file name, the windows that hold `step` or later ones and are planned: for a checkpoint."""
        per_pass, size = self.steps_per_pass, self._scheduling.window_steps
        return {
            _window_name(key): plan.to_json()
            for key, plan in self._windows.items()
            if key[0] * per_pass + min((key[1] + 1) * size, per_pass) > step
        }

    def plan(self, requests: Sequence[ResponseRequest]) -> StepPlan:
        """Where the responses of a step go; remembers what was expected of them."""
        tokens = {request.prompt_id: len(request.prompt_token_ids) for request in requests}
        self._expected = {name: self._predictor.predict(name, count) for name, count in tokens.items()}
        self._num_seen = {name: self._predictor.num_seen(name) for name in tokens}
        profile, shape = self.profile, self._shape
        return plan_step(
            [
                PlannedResponse(
                    response_id=request.response_id,
                    prompt_id=request.prompt_id,
                    prompt_tokens=len(request.prompt_token_ids),
                )
                for request in requests
            ],
            self._expected,
            num_ranks=shape.num_ranks,
            placement=self._scheduling.placement,
            clock=self._clock,
            kv_tokens=self._kv_tokens,
            running_limit_per_rank=shape.running_limit_per_rank,
            price=profile.price,
            wall_budget=profile.wall_budget if profile.wall_budget is not None else float("inf"),
            floor=shape.floor,
            allowed_sizes=shape.allowed_sizes,
            starting_size=self._scheduling.starting_size,
            seed=self._seed,
        )

    def placement(self, plan: StepPlan) -> PlacementPolicy:
        """A fresh one that carries out the plan."""
        return plan.policy(
            num_ranks=self._shape.num_ranks, running_limit_per_rank=self._shape.running_limit_per_rank
        )

    def step_time(self) -> StepTime:
        """A fresh one, in the seconds that the release policy prices in."""
        clock = self._clock
        return WallTime(clock) if isinstance(clock, CorrectedClock) else ModelledTime(clock)

    def release_policy(self) -> ReleasePolicy:
        """A fresh one for a step."""
        sets = self._shape.member_sets
        everybody = tuple(range(self._shape.num_ranks))
        return CostBasedRelease(
            clock=self._clock,
            num_ranks=self._shape.num_ranks,
            floor=self._shape.floor,
            profile=self.profile,
            allowed=AllowedSets.of_members([*sets, everybody]) if sets else AllowedSets.any(),
            kv_tokens=self._kv_tokens,
        )

    def prediction(self, prompt_id: str) -> LengthPrediction:
        """As of the last `plan`."""
        return self._expected[prompt_id]

    def planned_prompts(self) -> tuple[PlannedPrompt, ...]:
        """What was expected in the last `plan`, for the step's record."""
        return tuple(
            PlannedPrompt(
                prompt_id=name,
                expected_tokens=expected.expected_tokens,
                median_tokens=expected.quantile_tokens(0.5),
                p90_tokens=expected.quantile_tokens(0.9),
                cap_share=expected.cap_share,
                num_seen=self._num_seen[name],
            )
            for name, expected in self._expected.items()
        )

    def observe(self, responses: Sequence[Response], *, rollout_step: int) -> dict[str, float]:
        """Take a finished step into history and predictor; returns how good its predictions were."""
        pass_index = self._order.pass_index(rollout_step, self._shape.batch_size)
        observations = [
            observation_of(response, dataset=self._dataset, run_id=self._run_id, pass_index=pass_index)
            for response in responses
        ]
        lengths: dict[str, list[int]] = {}
        for response in responses:
            lengths.setdefault(response.prompt_id, []).append(response.num_tokens)
        figures = calibration(self._expected, lengths, self._num_seen)
        self._history.add(observations)
        self._predictor.observe(observations)
        return figures

    def _window(self, pass_index: int, window_index: int, per_pass: int) -> WindowPlan:
        key = (pass_index, window_index)
        if key not in self._windows:
            plan = self._read_window(key)
            if plan is None:
                plan = self._plan_window(pass_index, window_index, per_pass)
                self._write_window(key, plan)
            self._windows[key] = plan
        return self._windows[key]

    def _plan_window(self, pass_index: int, window_index: int, per_pass: int) -> WindowPlan:
        scheduling, shape = self._scheduling, self._shape
        first = window_index * scheduling.window_steps
        steps = range(first, min(first + scheduling.window_steps, per_pass))
        batches = (self._order.batch(pass_index * per_pass + step, shape.batch_size) for step in steps)
        per_rank = self._kv_tokens(shape.num_ranks)
        indices = [index for batch in batches for index in batch]
        return plan_window(
            indices,
            batch_size=shape.batch_size,
            predictions=lambda index: self._predictor.predict(
                self._prompts[index].prompt_id, self._prompts[index].num_tokens
            ),
            prompt_tokens=lambda index: self._prompts[index].num_tokens,
            num_responses_per_prompt=shape.num_responses_per_prompt,
            kv_capacity_tokens=None if per_rank is None else per_rank * shape.num_ranks,
            mode=scheduling.batching,
            rank_correlation=self._predictor.window_rank_correlation(
                [self._prompts[index].prompt_id for index in indices]
            ),
            min_rank_correlation=scheduling.min_rank_correlation,
            seed=self._seed,
            window_index=pass_index * per_pass + first,
            running_limit=shape.running_limit_per_rank * shape.num_ranks,
        )

    def _path(self, key: tuple[int, int]) -> Path | None:
        return None if self._folder is None else self._folder / _window_name(key)

    def _read_window(self, key: tuple[int, int]) -> WindowPlan | None:
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            return WindowPlan.from_json(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}. Fix: delete it, and the window is planned anew") from error

    def _write_window(self, key: tuple[int, int], plan: WindowPlan) -> None:
        path = self._path(key)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(plan.to_json()))
        part.replace(path)


def _window_name(key: tuple[int, int]) -> str:
    return f"window-{key[0]:04d}-{key[1]:04d}.json"
