"""`release.use=logprobs`: what the train step needs of complete prompt groups, computed during the rollout.

    responses finish > a group is complete > some worker is away > the trainer computes > train_step takes it

Rule 1: the rollout never waits for the trainer. A thread of its own makes the calls; while it does, nobody
else may use the trainer's client.
Rule 2: a group is computed once, whole, and packed by itself. So it makes no difference to the results which
groups were ready early; those that were not are computed by the same calls after the rollout.
Rule 3: a failure does not end the rollout. It is raised when the results are asked for.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition
from types import TracebackType
from typing import Protocol, Self

from flexfloor.config import AlgorithmConfig
from flexfloor.driver.prompt_groups import PromptGroups
from flexfloor.errors import FlexfloorError, StaleWeightsError
from flexfloor.release.use import Park
from flexfloor.training.client import CallAbandoned
from flexfloor.training.given import sequences_with_old
from flexfloor.training.messages import GroupLogprobs, LogprobGroup
from flexfloor.types import Response, ResponseRequest, TrainerLogprobs, TrainSequence

logger = logging.getLogger(__name__)


class LogprobSource(Protocol):
    """What is asked of the trainer's client."""

    def group_logprobs(
        self,
        groups: Sequence[LogprobGroup],
        *,
        weight_version: int,
        needs_reference: bool,
        is_wanted: Callable[[], bool],
    ) -> GroupLogprobs: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadFigures:
    """What was computed when. Seconds are the driver's, so they hold the way to the trainer and back."""

    num_groups: int
    """Prompt groups of which the step needs logprobs."""
    num_early_groups: int
    """Those that the trainer was asked for before the rollout ended."""
    early_token_share: float
    """Their share of the response tokens; 0 where nothing was needed."""
    saved_s: float
    """Seconds of the trainer inside the rollout: so much less was left to do after it."""
    late_s: float
    """From the end of the rollout until the last logprobs were here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    num_groups: int
    num_tokens: int
    started_at_s: float
    ended_at_s: float


class LogprobsAhead(Park):
    """The logprobs of one rollout step, as a context around its rollout and training.

    Example:
        with LogprobsAhead(requests, trainer=client, algorithm=algorithm, weight_version=7) as ahead:
            ...                       # on_response, left and recall are called while the rollout runs
            ahead.rollout_ended()
            given = ahead.results()

    Leaving the context gives up what is still being computed.
    """

    def __init__(
        self,
        requests: Sequence[ResponseRequest],
        *,
        trainer: LogprobSource,
        algorithm: AlgorithmConfig,
        weight_version: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        later = sequences_with_old(len(requests), algorithm)
        self._names_with_old = frozenset(requests[index].response_id for index in later)
        self._needs_reference = bool(algorithm.kl_coef)
        self._weight_version = weight_version
        self._trainer = trainer
        self._clock = clock
        self._groups = PromptGroups(requests, weight_version)
        self._missing = {request.response_id for request in requests}
        # The thread waits on it; everything below is changed under it.
        self._changed = Condition()
        self._waiting: list[LogprobGroup] = []
        self._away: frozenset[int] = frozenset()
        self._ended_at_s: float | None = None
        self._is_abandoned = False
        self._found: dict[str, TrainerLogprobs] = {}
        self._calls: list[_Call] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="logprobs")
        self._work = self._thread.submit(self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()
        # Not long: the client asks several times a second whether its answer is still wanted.
        self._thread.shutdown()

    def on_response(self, response: Response) -> None:
        """Raises what `PromptGroups.add` raises."""
        group = self._groups.add(response)
        if group is None:
            return
        needs_old = any(one.response_id in self._names_with_old for one in group)
        with self._changed:
            if needs_old or self._needs_reference:
                self._waiting.append(LogprobGroup([_sequence(one) for one in group], needs_old))
            else:
                self._keep([self._empty(one) for one in group])
            self._changed.notify()

    def left(self, ep_ranks: tuple[int, ...]) -> None:
        with self._changed:
            self._away |= set(ep_ranks)
            self._changed.notify()

    def recall(self, ep_ranks: tuple[int, ...], *, wait: bool) -> None:
        """No call begins before some worker is away again. One that runs goes on: it computes in the
        trainer's processes and memory and holds nothing of the worker's.
        """
        with self._changed:
            self._away -= set(ep_ranks)

    def rollout_ended(self) -> None:
        """Every response has been handed in; no decoding is left that the trainer could slow down."""
        with self._changed:
            self._ended_at_s = self._clock()
            self._changed.notify()

    def results(self) -> Mapping[str, TrainerLogprobs]:
        """By response_id, once all are there. Raises what the trainer's client or a stale answer raised."""
        assert self._ended_at_s is not None, "some groups may only be computed after the rollout"
        # Each of its calls has the client's own deadline.
        self._work.result()
        assert not self._missing, f"{len(self._missing)} responses were never handed in"
        return self._found

    def figures(self) -> AheadFigures:
        """After `results`."""
        assert self._ended_at_s is not None
        end_s = self._ended_at_s
        early = [call for call in self._calls if call.started_at_s < end_s]
        num_tokens = sum(call.num_tokens for call in self._calls)
        return AheadFigures(
            num_groups=sum(call.num_groups for call in self._calls),
            num_early_groups=sum(call.num_groups for call in early),
            early_token_share=sum(call.num_tokens for call in early) / num_tokens if num_tokens else 0.0,
            saved_s=sum(min(call.ended_at_s, end_s) - call.started_at_s for call in early),
            late_s=max([0.0, *(call.ended_at_s - end_s for call in self._calls)]),
        )

    def _run(self) -> None:
        """The thread: calls until all is there. What it raises waits in `results`."""
        try:
            while groups := self._next_groups():
                self._compute(groups)
        except CallAbandoned:
            logger.debug("event=logprobs_abandoned")
        except FlexfloorError as error:
            logger.error(
                "event=logprobs_failed, and the step will fail once its rollout has ended: %s", error
            )
            raise

    def _next_groups(self) -> list[LogprobGroup]:
        """All that may be asked for now; empty when all is there, or wanted no more."""
        with self._changed:
            # Ends at the latest when the context is left.
            self._changed.wait_for(self._is_over_or_ready)
            if self._is_abandoned:
                return []
            groups, self._waiting = self._waiting, []
            return groups

    def _is_over_or_ready(self) -> bool:
        is_free = bool(self._away) or self._ended_at_s is not None
        return self._is_abandoned or not self._missing or (is_free and bool(self._waiting))

    def _compute(self, groups: Sequence[LogprobGroup]) -> None:
        started_at_s = self._clock()
        answer = self._trainer.group_logprobs(
            groups,
            weight_version=self._weight_version,
            needs_reference=self._needs_reference,
            is_wanted=lambda: not self._is_abandoned,
        )
        sequences = [sequence for group in groups for sequence in group.sequences]
        self._check(sequences, answer.logprobs)
        call = _Call(
            num_groups=len(groups),
            num_tokens=sum(len(sequence.response_token_ids) for sequence in sequences),
            started_at_s=started_at_s,
            ended_at_s=self._clock(),
        )
        with self._changed:
            self._calls.append(call)
            self._keep(answer.logprobs)
        logger.info(
            "event=logprobs groups=%d tokens=%d took_s=%.3f trainer_s=%.3f",
            call.num_groups,
            call.num_tokens,
            call.ended_at_s - call.started_at_s,
            answer.seconds,
        )

    def _check(self, sequences: Sequence[TrainSequence], logprobs: Sequence[TrainerLogprobs]) -> None:
        for sequence, found in zip(sequences, logprobs, strict=True):
            if (found.response_id, found.weight_version) != (sequence.response_id, self._weight_version):
                raise StaleWeightsError(
                    f"asked for the logprobs of response {sequence.response_id} by weight_version "
                    f"{self._weight_version}, the trainer answered with those of {found.response_id} by "
                    f"{found.weight_version}"
                )

    def _keep(self, logprobs: Sequence[TrainerLogprobs]) -> None:
        for found in logprobs:
            self._found[found.response_id] = found
            self._missing.remove(found.response_id)

    def _empty(self, response: Response) -> TrainerLogprobs:
        return TrainerLogprobs(
            response_id=response.response_id, weight_version=self._weight_version, old=None, reference=None
        )


def _sequence(response: Response) -> TrainSequence:
    """Tokens are all that logprobs are computed from."""
    return TrainSequence(
        prompt_token_ids=response.prompt_token_ids,
        response_token_ids=response.token_ids,
        rollout_logprobs=(),
        advantage=0.0,
        response_id=response.response_id,
    )
