"""A rollout step on a simulated SGLang group: discrete events over decode iterations. PURE.

The model (SGLang 0.5.23, attention-DP = EP): every member runs every iteration in lockstep. In an iteration a
rank either prefills what it lets in from its queue (each of those gets its first token, and nobody else on
that rank a token) or adds a token to each of its running responses; a rank without tokens only serves its
experts. So L tokens take one prefill and L - 1 decode iterations. A group without tokens anywhere has no
iteration. Members that leave stop counting at the switch. A moved response goes to the end of its new rank's
queue and is prefilled there with its prompt and its tokens so far, which it keeps.

Between two events nothing changes but the context, so the loop jumps from event to event. Policies see
estimates only: the true length of a response decides when it ends, and nothing else.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexfloor.iterations import StepIterations
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.decision import GroupView, ReleaseDecision, RunningResponse
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.place import PlacementPolicy
from flexfloor.simulate.group import Group, Limits
from flexfloor.simulate.rank import Request

__all__ = ["DecisionFact", "Limits", "MoveFact", "SimulatedResponse", "StepOutcome", "simulate_step"]

Decide = Callable[[GroupView], ReleaseDecision]


class Observe(Protocol):
    def __call__(self, *, num_ranks: int, predicted_s: float, observed_s: float) -> None: ...


class Releases(Protocol):
    """The release policy of one step, as `flexfloor.scheduling.decision.ReleasePolicy`."""

    def decide(self, view: GroupView) -> ReleaseDecision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedResponse:
    """A response of the step. Only the engine reads `num_tokens`."""

    response_id: str
    prompt_tokens: int
    num_tokens: int
    """How long it becomes."""
    max_new_tokens: int
    prediction: LengthPrediction
    arrival_iteration: int = 0
    """It is not submitted before that many iterations of the step ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFact:
    at_iteration: int
    response_id: str
    source: int
    target: int
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFact:
    """A decision that ordered something."""

    at_iteration: int
    at_s: float
    """As the policy saw it."""
    decision: ReleaseDecision
    outcome: str
    """`done`, or why it could not be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    iterations: StepIterations
    starting_members: tuple[int, ...]
    finished_at: tuple[int, ...]
    """By response in the order given: how many iterations had run when it ended."""
    finished_on: tuple[int, ...]
    """By response: the rank."""
    moves: tuple[MoveFact, ...]
    decisions: tuple[DecisionFact, ...]
    num_retractions: int
    policy_s: float
    """How long the step took for the release policy, stalls included; 0 without one."""

    @property
    def num_refused(self) -> int:
        return sum(fact.outcome != "done" for fact in self.decisions)


def simulate_step(
    responses: Sequence[SimulatedResponse],
    placement: PlacementPolicy,
    *,
    members: Sequence[int],
    limits: Limits,
    release: Releases | None = None,
    policy_clock: Clock | None = None,
    truth_clock: Clock | None = None,
    observe: Observe | None = None,
) -> StepOutcome:
    """One rollout step: `responses` in the order of submission, `members` serve from the start.

    `policy_clock` is needed with `release`: it gives the time that the policy sees, unless there is a
    `truth_clock` that does, as a watch on the wall would. `observe` is told after each interval between
    decisions what one of its decode iterations took on either clock, and in a group of how many. Raises
    ValueError for a response without tokens, or longer than it may become.
    """
    _check(responses, members, placement)
    if release is not None and policy_clock is None:
        raise ValueError("a release policy needs the clock that it prices in")
    group = Group(placement.num_ranks, members, limits)
    return _Step(responses, placement, group, release, policy_clock, truth_clock, observe).run()


@dataclass(slots=True, kw_only=True)
class _Order:
    """A decision that is being carried out."""

    decision: ReleaseDecision
    moves_at: int
    leaves_at: int
    """Iterations of the step."""
    has_moved: bool = False

    @property
    def next_at(self) -> int:
        return self.leaves_at if self.has_moved else self.moves_at


class _Step:
    def __init__(
        self,
        responses: Sequence[SimulatedResponse],
        placement: PlacementPolicy,
        group: Group,
        release: Releases | None,
        policy_clock: Clock | None,
        truth_clock: Clock | None,
        observe: Observe | None,
    ) -> None:
        self._responses = responses
        self._placement = placement
        self._group = group
        self._release = release
        self._policy_clock = policy_clock
        self._seen_clock = truth_clock or policy_clock
        self._observe = observe
        self._requests = [
            Request(
                index=index,
                prompt_tokens=response.prompt_tokens,
                num_tokens=response.num_tokens,
                max_new_tokens=response.max_new_tokens,
            )
            for index, response in enumerate(responses)
        ]
        self._index_of = {response.response_id: index for index, response in enumerate(responses)}
        by_arrival = sorted(range(len(responses)), key=lambda index: responses[index].arrival_iteration)
        self._arriving = deque(by_arrival)
        self._waiting: deque[int] = deque()
        """Arrived, and not yet given to a rank."""
        self._finished_at = [-1] * len(responses)
        self._finished_on = [-1] * len(responses)
        self._num_left = len(responses)
        self._moves: list[MoveFact] = []
        self._decisions: list[DecisionFact] = []
        self._starting_members = group.members
        self._policy_s = 0.0
        self._since: tuple[int, float, float] = (0, 0.0, 0.0)
        """Decode iterations since the last decision point, and their seconds as expected and as seen."""
        self._next_decision = group.limits.decision_interval_iterations
        self._order: _Order | None = None

    def run(self) -> StepOutcome:
        while self._num_left:
            self._arrive()
            group = self._group
            if group.is_without_tokens:
                # No iteration without tokens: time goes to the next arrival.
                group.skip_to(self._responses[self._arriving[0]].arrival_iteration)
                continue
            group.advance(self._horizon(), self._took)
            finished = group.pop_finished()
            for dp_rank, request in finished:
                self._finish(dp_rank, request)
            if finished:
                self._submit_waiting()
            if self._order is not None:
                self._go_on_with(self._order)
            self._decide(group.has_drained(finished))
        return StepOutcome(
            iterations=self._group.finish_rows(),
            starting_members=self._starting_members,
            finished_at=tuple(self._finished_at),
            finished_on=tuple(self._finished_on),
            moves=tuple(self._moves),
            decisions=tuple(self._decisions),
            num_retractions=self._group.num_retractions,
            policy_s=self._policy_s,
        )

    def _horizon(self) -> int:
        """Most iterations until something comes from outside of the group."""
        now = self._group.iteration
        ends = [self._next_decision - now] if self._release is not None else []
        if self._order is not None:
            ends = [self._order.next_at - now]
        if self._arriving:
            ends.append(self._responses[self._arriving[0]].arrival_iteration - now)
        return max(1, min(ends, default=2**62))

    def _took(self, repeats: int) -> None:
        """So many iterations are about to run: add their time."""
        if self._release is None or self._policy_clock is None or self._seen_clock is None:
            return
        load, prefill_tokens = self._group.load(repeats)
        seen_s = self._seen_clock.decode_s(load) * repeats
        if prefill_tokens:
            self._policy_s += seen_s + self._seen_clock.prefill_s(prefill_tokens)
            return
        self._policy_s += seen_s
        if self._observe is not None:
            count, expected_s, before_s = self._since
            expected_s += self._policy_clock.decode_s(load) * repeats
            self._since = (count + repeats, expected_s, before_s + seen_s)

    def _arrive(self) -> None:
        now, arrived = self._group.iteration, False
        while self._arriving and self._responses[self._arriving[0]].arrival_iteration <= now:
            self._waiting.append(self._arriving.popleft())
            arrived = True
        if arrived:
            self._submit_waiting()

    def _submit_waiting(self) -> None:
        while self._waiting:
            index = self._waiting[0]
            dp_rank = self._placement.submit(self._responses[index].response_id)
            if dp_rank is None:
                return
            self._waiting.popleft()
            self._group.enqueue(dp_rank, self._requests[index])

    def _finish(self, dp_rank: int, request: Request) -> None:
        self._finished_at[request.index] = self._group.iteration
        self._finished_on[request.index] = dp_rank
        self._num_left -= 1
        self._placement.finish(self._responses[request.index].response_id)

    def _decide(self, has_drained: bool) -> None:
        """At a drained rank at once, else every few iterations."""
        if self._release is None or not self._num_left or self._order is not None:
            return
        if not has_drained and self._group.iteration < self._next_decision:
            return
        self._next_decision = self._group.iteration + self._group.limits.decision_interval_iterations
        count, expected_s, seen_s = self._since
        if self._observe is not None and count:
            num_ranks = len(self._group.members)
            self._observe(num_ranks=num_ranks, predicted_s=expected_s / count, observed_s=seen_s / count)
        self._since = (0, 0.0, 0.0)
        decision = self._release.decide(self._view())
        if not decision.is_stay:
            self._carry_out(decision)

    def _view(self) -> GroupView:
        group = self._group
        return GroupView(
            at_s=self._policy_s,
            num_ranks=group.num_ranks,
            members=group.members,
            responses=tuple(
                tuple(
                    self._running(request, generated, is_queued)
                    for request, generated, is_queued in group.requests_on(dp_rank)
                )
                for dp_rank in range(group.num_ranks)
            ),
        )

    def _running(self, request: Request, generated: int, is_queued: bool) -> RunningResponse:
        response = self._responses[request.index]
        return RunningResponse(
            response_id=response.response_id,
            prompt_tokens=response.prompt_tokens,
            generated_tokens=generated,
            prediction=response.prediction,
            is_queued=is_queued,
        )

    def _carry_out(self, decision: ReleaseDecision) -> None:
        group, at_s = self._group, self._policy_s
        refusal = self._refusal(decision)
        fact = DecisionFact(
            at_iteration=group.iteration, at_s=at_s, decision=decision, outcome=refusal or "done"
        )
        self._decisions.append(fact)
        if refusal:
            return
        limits, now = group.limits, group.iteration
        self._order = _Order(
            decision=decision,
            moves_at=now + limits.move_latency_iterations,
            leaves_at=now + max(limits.move_latency_iterations, limits.release_latency_iterations),
        )
        # New responses go to those who stay from now on, as in the live system.
        self._placement.set_members([rank for rank in group.members if rank not in decision.leavers])
        self._go_on_with(self._order)

    def _go_on_with(self, order: "_Order") -> None:
        """What is due of an order that was given; a response that has ended meanwhile does not move."""
        group = self._group
        if not order.has_moved and group.iteration >= order.moves_at:
            order.has_moved = True
            for move in order.decision.moves:
                if group.holds(move.source, self._index_of[move.response_id]):
                    self._move(move.response_id, move.source, move.target)
        if not order.has_moved or group.iteration < order.leaves_at or not self._num_left:
            return
        before = len(group.members)
        group.leave(order.decision.leavers)
        self._placement.set_members(group.members)
        if self._seen_clock is not None:
            self._policy_s += self._seen_clock.switch_s(before, len(group.members))
        self._order = None

    def _refusal(self, decision: ReleaseDecision) -> str:
        """Why the decision does not fit the group, or nothing."""
        group, leavers = self._group, set(decision.leavers)
        staying = set(group.members) - leavers
        if not leavers <= set(group.members) or not staying:
            return f"leavers {sorted(leavers)} of members {group.members}"
        moved = {}
        for move in decision.moves:
            index = self._index_of.get(move.response_id, -1)
            if move.target not in staying or not group.holds(move.source, index):
                return f"{move.response_id} cannot move from rank {move.source} to {move.target}"
            moved[index] = move.source
        for dp_rank in sorted(leavers):
            left = [request for request, _, _ in group.requests_on(dp_rank) if request.index not in moved]
            if left:
                return f"rank {dp_rank} would leave with {len(left)} responses"
        return ""

    def _move(self, response_id: str, source: int, target: int) -> None:
        request = self._requests[self._index_of[response_id]]
        self._group.take_off(source, request)
        self._placement.move(response_id, target)
        self._placement.finish(response_id)
        dp_rank = self._placement.submit(response_id)
        assert dp_rank is not None, "a moved response is taken beyond any limit"
        self._group.enqueue(dp_rank, request)
        self._moves.append(
            MoveFact(
                at_iteration=self._group.iteration,
                response_id=response_id,
                source=source,
                target=dp_rank,
                generated_tokens=request.generated,
            )
        )


def _check(
    responses: Sequence[SimulatedResponse], members: Sequence[int], placement: PlacementPolicy
) -> None:
    if not members or not set(members) <= set(range(placement.num_ranks)):
        raise ValueError(f"members={tuple(members)}: one or more of 0 to {placement.num_ranks - 1}")
    for response in responses:
        if not 1 <= response.num_tokens <= response.max_new_tokens:
            raise ValueError(
                f"response {response.response_id} has {response.num_tokens} tokens of at most "
                f"{response.max_new_tokens}"
            )
    if len({response.response_id for response in responses}) != len(responses):
        raise ValueError("a response_id occurs twice")
