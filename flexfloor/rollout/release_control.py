"""Carries out a release policy on a running step: shows it the group, orders moves and releases, keeps book.

Rule 1: this only asks; whether and how a rank leaves is the membership manager's decision, and a refusal
costs nothing but the gain.
Rule 2: one order at a time. What it became is known before the policy is asked again.
Rule 3: a lost rank is away for good, whoever ended it; it is asked nothing.
Rule 4: a rank that got late work is back by itself: the request wakes it. One that has exited gets none: the
placement left it out before it was asked to go.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexfloor.errors import FlexfloorError
from flexfloor.membership.client import DriverClient
from flexfloor.membership.events import Leave
from flexfloor.membership.status import MembershipStatus
from flexfloor.release.use import Park, WorkerUse
from flexfloor.rollout.control import StepControl, UnfinishedResponse
from flexfloor.rollout.step_time import StepTime
from flexfloor.schedule_record import Absence, DecisionRecord, MoveRecord
from flexfloor.scheduling.decision import GroupView, ReleaseDecision, ReleasePolicy, RunningResponse
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.place import PlacementPolicy

logger = logging.getLogger(__name__)


class RejoinFailed(FlexfloorError, RuntimeError):
    """The manager will not, or cannot, bring back the ranks that left."""


_LOOK_INTERVAL_S = 0.02
"""A decode iteration of a small model; asking more often could not release anybody earlier."""


@dataclass(slots=True, kw_only=True)
class _Order:
    """A decision on its way."""

    decision: ReleaseDecision
    at_s: float
    moves: tuple[MoveRecord, ...]
    open: dict[str, tuple[int, ...]]
    """operation_id -> its ranks, for what the manager has not answered: ranks that park, ranks that exit."""
    reasons: list[str] = field(default_factory=list)
    """Why ranks stay."""


@dataclass(slots=True, kw_only=True)
class _Done:
    order: _Order
    outcome: str
    took_s: float


@dataclass(slots=True, kw_only=True)
class ReleaseControl:
    """One rollout step's releases, over a client that is connected.

    `left_at_s`, `absences` and `decisions` are on `clock`, in seconds.
    """

    client: DriverClient
    policy: ReleasePolicy | None
    """None: nobody leaves but those that the step does not start with."""
    placement: PlacementPolicy
    prediction: Callable[[str], LengthPrediction]
    step_time: StepTime
    decision_interval_tokens: int
    """A look that shows no new drained rank asks nothing before some response has got so many new tokens."""
    use: WorkerUse = field(default_factory=Park)
    clock: Callable[[], float] = time.monotonic
    left_at_s: dict[int, float] = field(default_factory=dict)
    """dp_rank -> when its release was done, for ranks that are away."""
    exited: set[int] = field(default_factory=set)
    """Those of them that are gone for good."""
    last_counters: dict[int, dict[str, int]] = field(default_factory=dict)
    """Of the ranks that have exited, once `rejoin` is through."""
    num_refused: int = 0
    last_reason: str = ""
    """Of the last decision to stay."""
    _done: list[_Done] = field(default_factory=list)
    _absences: list[tuple[int, float, float | None]] = field(default_factory=list)
    _order: _Order | None = None
    _generated: dict[str, int] = field(default_factory=dict)
    """Tokens by response_id when the policy was last asked."""
    _seen: tuple[frozenset[int], frozenset[int]] | None = None
    """Members without responses then, and ranks that were lost."""

    async def watch(self, step: StepControl) -> None:
        """Ask and order while the step runs, until cancelled."""
        while True:
            self.look(step)
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def start_with(self, members: Sequence[int]) -> None:
        """Let the others leave before the step begins; waits for it. Those refused stay in."""
        others = [rank for rank in self._members() if rank not in members]
        if not others:
            return
        for leave, ranks in self._by_leave(others):
            result = self.client.release(ranks, leave.value)
            if result.ok:
                self._has_left(ranks)
            else:
                self.num_refused += 1
                logger.info("the step starts with ep_ranks=%s as well: %s", ranks, result.reason)
        self.placement.set_members(self._members())

    def look(self, step: StepControl) -> None:
        """Take in what became of the last order, and ask the policy where something has changed."""
        self._take_results()
        self._take_late_work()
        self._take_lost()
        unfinished = step.unfinished()
        if self.policy is None or self._order is not None or not unfinished or not self._is_news(unfinished):
            return
        view = self._view(unfinished)
        learned = self.step_time.feedback
        if learned is not None:
            self.policy.observe(predicted_s=learned.predicted_s, observed_s=learned.observed_s)
        decision = self.policy.decide(view)
        if decision.is_stay:
            self.last_reason = decision.reason
        else:
            self._carry_out(decision, view, step)

    async def rejoin(self) -> None:
        """Bring everybody back who is not gone for good.

        Raises DeadlineExceeded, or RejoinFailed with the manager's reason.
        """
        away = tuple(sorted(self.left_at_s.keys() - self.placement.lost))
        await asyncio.to_thread(self.use.recall, away, wait=True)
        result = await asyncio.to_thread(self.client.rejoin)
        if not result.ok:
            raise RejoinFailed(f"the ranks that left cannot come back: {result.reason}")
        status = await asyncio.to_thread(self.client.status)
        self.take_lost_of(status)
        self.last_counters = {rank: status.last_counters.get(rank, {}) for rank in self.exited}

    def take_lost_of(self, status: MembershipStatus) -> None:
        """The manager may know of a death that no response told of."""
        for rank in status.lost:
            self.placement.lose(rank)
        self._take_lost()

    def decisions(self, started_at_s: float, finished_at_s: float) -> tuple[DecisionRecord, ...]:
        """Every order of the step with its outcome; one that the step's end overtook says so."""
        done = list(self._done)
        if self._order is not None:
            took_s = finished_at_s - self._order.at_s
            done.append(_Done(order=self._order, outcome="the step ended before it was done", took_s=took_s))
        return tuple(
            DecisionRecord(
                at_s=item.order.at_s - started_at_s,
                leavers=item.order.decision.leavers,
                moves=item.order.moves,
                reason=item.order.decision.reason,
                predicted_gain_s=item.order.decision.predicted_gain_s,
                predicted_remaining_s=item.order.decision.predicted_remaining_s,
                outcome=item.outcome,
                realised_remaining_s=finished_at_s - item.order.at_s,
                took_s=item.took_s,
            )
            for item in done
        )

    def absences(self, started_at_s: float) -> tuple[Absence, ...]:
        return tuple(
            Absence(
                dp_rank=rank,
                from_s=from_s - started_at_s,
                to_s=None if to_s is None else to_s - started_at_s,
            )
            for rank, from_s, to_s in self._absences
        )

    def _is_news(self, unfinished: Sequence[UnfinishedResponse]) -> bool:
        """A member has drained or died, or the running responses have grown by the interval."""
        if any(self.placement.inflight[rank] for rank in self.placement.lost):
            # Their responses are about to come back, and to go elsewhere.
            return False
        if sum(self.placement.inflight) != sum(response.dp_rank is not None for response in unfinished):
            # Some are placed and not yet sent: their ranks would look drained.
            return False
        drained = frozenset(rank for rank in self._members() if not self.placement.inflight[rank])
        generated = {response.response_id: response.generated_tokens for response in unfinished}
        grown = max(count - self._generated.get(name, 0) for name, count in generated.items())
        seen = (drained, self.placement.lost)
        if self._seen == seen and grown < self.decision_interval_tokens:
            return False
        self._seen, self._generated = seen, generated
        return True

    def _view(self, unfinished: Sequence[UnfinishedResponse]) -> GroupView:
        ranks: list[list[RunningResponse]] = [[] for _ in range(self.placement.num_ranks)]
        for response in unfinished:
            ranks[self._rank_of(response)].append(
                RunningResponse(
                    response_id=response.response_id,
                    prompt_tokens=response.prompt_tokens,
                    generated_tokens=response.generated_tokens,
                    prediction=self.prediction(response.prompt_id),
                    is_queued=not response.has_begun or response.moves_to is not None,
                )
            )
        view = GroupView(
            at_s=0.0,
            num_ranks=self.placement.num_ranks,
            members=self._members(),
            responses=tuple(tuple(rank) for rank in ranks),
        )
        return GroupView(
            at_s=self.step_time.advance(view),
            num_ranks=view.num_ranks,
            members=view.members,
            responses=view.responses,
        )

    def _rank_of(self, response: UnfinishedResponse) -> int:
        """Where it is, or is going; one that waits for a place gets it on the rank with fewest."""
        if response.moves_to is not None:
            return response.moves_to
        if response.dp_rank is not None:
            return response.dp_rank
        return min(self._members(), key=lambda rank: (self.placement.inflight[rank], rank))

    def _members(self) -> tuple[int, ...]:
        away = self.left_at_s.keys() | self.placement.lost
        return tuple(rank for rank in range(self.placement.num_ranks) if rank not in away)

    def _carry_out(self, decision: ReleaseDecision, view: GroupView, step: StepControl) -> None:
        stay = [rank for rank in view.members if rank not in decision.leavers]
        self.placement.set_members(stay)
        generated = {item.response_id: item.generated_tokens for rank in view.responses for item in rank}
        # One that has just finished does not move.
        moved = [move for move in decision.moves if step.move(move.response_id, move.target)]
        moves = tuple(
            MoveRecord(
                response_id=move.response_id,
                source=move.source,
                target=move.target,
                generated_tokens=generated[move.response_id],
            )
            for move in moved
        )
        at_s = self.clock()
        submitted = {
            self.client.submit_release(ranks, leave.value): ranks
            for leave, ranks in self._by_leave(decision.leavers)
        }
        self._order = _Order(decision=decision, at_s=at_s, moves=moves, open=submitted)
        logger.info("event=release leavers=%s moves=%d %s", decision.leavers, len(moves), decision.reason)

    def _take_results(self) -> None:
        for result in self.client.poll():
            order = self._order
            if order is None or result.operation_id not in order.open:
                continue
            ranks = order.open.pop(result.operation_id)
            if result.ok:
                self._has_left(ranks)
            else:
                self.num_refused += 1
                order.reasons.append(result.reason)
                logger.info("ep_ranks=%s stay: %s", ranks, result.reason)
            if not order.open:
                self._finish_order(order)

    def _finish_order(self, order: _Order) -> None:
        outcome = "; ".join(order.reasons) or "done"
        self._done.append(_Done(order=order, outcome=outcome, took_s=self.clock() - order.at_s))
        self._order = None
        if order.reasons:
            self.placement.set_members(self._members())

    def _by_leave(self, ep_ranks: Sequence[int]) -> list[tuple[Leave, tuple[int, ...]]]:
        ways = [
            (leave, tuple(rank for rank in ep_ranks if self.use.leave_of(rank) is leave)) for leave in Leave
        ]
        return [(leave, ranks) for leave, ranks in ways if ranks]

    def _has_left(self, ep_ranks: tuple[int, ...]) -> None:
        now_s = self.clock()
        self.left_at_s.update(dict.fromkeys(ep_ranks, now_s))
        self._absences += [(rank, now_s, None) for rank in ep_ranks]
        self.exited.update(rank for rank in ep_ranks if self.use.leave_of(rank) is Leave.exit)
        self.use.left(ep_ranks)

    def _take_lost(self) -> None:
        now_s = self.clock()
        for rank in self.placement.lost - self.left_at_s.keys():
            self.left_at_s[rank] = now_s
            self._absences.append((rank, now_s, None))

    def _take_late_work(self) -> None:
        inflight, now_s = self.placement.inflight, self.clock()
        for rank in [rank for rank in self.left_at_s if inflight[rank] and rank not in self.placement.lost]:
            del self.left_at_s[rank]
            self._absences = [
                (who, from_s, now_s if who == rank and to_s is None else to_s)
                for who, from_s, to_s in self._absences
            ]
            self.use.recall((rank,), wait=False)
            self.placement.set_members(self._members())
