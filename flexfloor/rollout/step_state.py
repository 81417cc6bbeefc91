"""What is known about every response of a rollout step: a fold over ledger records. PURE.

Three rules. State changes only in `StepState.apply`, so a running step and its ledger read back agree. A
response finishes once: a second finish is a duplicate, anything of an attempt that was given up is late;
both are dropped and counted. A record that contradicts the ones before it raises LedgerError.

    submit -> (tokens)* -> finished
                  |
                  +-> aborted -> submit (next attempt, goes on after the tokens so far)
"""

from dataclasses import dataclass, field

from flexfloor.errors import LedgerError, StaleWeightsError
from flexfloor.records import Aborted, Finished, LedgerRecord, Progress, StepOpened, Submitted
from flexfloor.types import Response


@dataclass(slots=True, kw_only=True)
class ResponseState:
    """One response so far. `len(token_ids) == len(logprobs)`; they span all attempts."""

    first: Submitted
    attempt: int = 1
    dp_rank: int = 0
    is_running: bool = True
    is_moved: bool = False
    """Its last attempt was ended by a planned move."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def remaining_tokens(self) -> int:
        return self.first.cap_tokens - len(self.token_ids)


class StepState:
    """State of one rollout step; built by feeding `apply` the records of its ledger, in order."""

    def __init__(self) -> None:
        self.opened: StepOpened | None = None
        self.responses: dict[str, ResponseState] = {}
        self.num_finished = 0
        self.num_tokens = 0
        self.num_retries = 0
        """Attempts after one that was lost."""
        self.num_moves = 0
        """Attempts after one that was ended to continue on another rank."""
        self.num_duplicates = 0
        """Second finishes of a response: dropped."""
        self.num_late = 0
        """Records of an attempt that had been given up or of a finished response: dropped."""

    def apply(self, record: LedgerRecord) -> bool:
        """Take in a record. False: it was a duplicate or late, and changed nothing but a count."""
        match record:
            case StepOpened():
                return self._open(record)
            case Submitted():
                return self._submit(record)
            case Progress():
                return self._progress(record)
            case Finished():
                return self._finish(record)
            case Aborted():
                return self._abort(record)

    def response(self, response_id: str) -> Response:
        """A finished response with its tokens. Raises LedgerError where it has not finished."""
        known = self._known(response_id)
        end, first = known.finished, known.first
        if end is None or self.opened is None:
            raise LedgerError(f"response {response_id} has not finished")
        return Response(
            response_id=response_id,
            rollout_step=self.opened.rollout_step,
            prompt_id=first.prompt_id,
            sample_index=first.sample_index,
            prompt_token_ids=first.prompt_token_ids,
            token_ids=tuple(known.token_ids),
            logprobs=tuple(known.logprobs),
            dp_rank=end.dp_rank,
            weight_version=end.weight_version,
            finish_reason=end.finish_reason,
            cap_tokens=end.cap_tokens,
            started_at_s=end.started_at_s,
            finished_at_s=end.finished_at_s,
            num_attempts=end.attempt,
        )

    def finished_responses(self) -> tuple[Response, ...]:
        """Every finished response, in the order of first submission."""
        return tuple(self.response(name) for name, known in self.responses.items() if known.finished)

    def validate(self) -> None:
        """Invariants between records; raises LedgerError."""
        for name, known in self.responses.items():
            if len(known.token_ids) != len(known.logprobs):
                raise LedgerError(f"response {name}: the numbers of tokens and logprobs differ")
            if known.remaining_tokens < 0:
                raise LedgerError(f"response {name}: {-known.remaining_tokens} tokens above its cap")
        if self.num_finished != sum(known.finished is not None for known in self.responses.values()):
            raise LedgerError(f"num_finished={self.num_finished} is not the number of finished responses")

    def _open(self, record: StepOpened) -> bool:
        if self.opened is not None:
            raise LedgerError("the step is opened twice")
        self.opened = record
        return True

    def _submit(self, record: Submitted) -> bool:
        known = self.responses.get(record.response_id)
        if self.opened is None:
            raise LedgerError(f"{_story(record)}: the step was never opened")
        if known is None:
            if record.attempt != 1:
                raise LedgerError(f"{_story(record)}: attempt 1 is missing")
            self.responses[record.response_id] = ResponseState(first=record, dp_rank=record.dp_rank)
            return True
        if known.finished or known.is_running or record.attempt != known.attempt + 1:
            raise LedgerError(f"{_story(record)}: {_describe(known)} does not accept it")
        known.attempt, known.dp_rank, known.is_running = record.attempt, record.dp_rank, True
        self.num_moves += known.is_moved
        self.num_retries += not known.is_moved
        return True

    def _progress(self, record: Progress) -> bool:
        known = self._known(record.response_id)
        if self._is_late(known, record):
            return False
        if len(record.token_ids) != len(record.logprobs):
            raise LedgerError(
                f"{_story(record)}: {len(record.token_ids)} tokens, {len(record.logprobs)} logprobs"
            )
        if record.offset_tokens != len(known.token_ids) or len(record.token_ids) > known.remaining_tokens:
            raise LedgerError(
                f"{_story(record)}: {len(record.token_ids)} tokens at offset {record.offset_tokens} do not "
                f"fit after {len(known.token_ids)} tokens under the cap {known.first.cap_tokens}"
            )
        known.token_ids += record.token_ids
        known.logprobs += record.logprobs
        self.num_tokens += len(record.token_ids)
        return True

    def _finish(self, record: Finished) -> bool:
        known = self._known(record.response_id)
        if known.finished is not None:
            self.num_duplicates += 1
            return False
        if self._is_late(known, record):
            return False
        self._check_version(record)
        if record.num_tokens != len(known.token_ids):
            raise LedgerError(
                f"{_story(record)}: {record.num_tokens} tokens, but {len(known.token_ids)} on record"
            )
        known.finished, known.is_running = record, False
        self.num_finished += 1
        return True

    def _abort(self, record: Aborted) -> bool:
        known = self._known(record.response_id)
        if self._is_late(known, record):
            return False
        known.is_running, known.is_moved = False, record.moved_to is not None
        return True

    def _is_late(self, known: ResponseState, record: Progress | Finished | Aborted) -> bool:
        if record.attempt > known.attempt:
            raise LedgerError(f"{_story(record)}: {_describe(known)}, so this attempt was never submitted")
        if known.is_running and record.attempt == known.attempt:
            return False
        self.num_late += 1
        return True

    def _check_version(self, record: Finished) -> None:
        assert self.opened is not None, "a response is known, so the step was opened"
        if record.weight_version != self.opened.weight_version:
            raise StaleWeightsError(
                f"response {record.response_id} was made by weight_version {record.weight_version}, rollout "
                f"step {self.opened.rollout_step} runs on {self.opened.weight_version}"
            )

    def _known(self, response_id: str) -> ResponseState:
        known = self.responses.get(response_id)
        if known is None:
            raise LedgerError(f"response {response_id} was never submitted")
        return known


def _story(record: Submitted | Progress | Finished | Aborted) -> str:
    return f"{type(record).__name__} of response {record.response_id}, attempt {record.attempt}"


def _describe(known: ResponseState) -> str:
    state = "finished" if known.finished else "running" if known.is_running else "waiting"
    return f"the response is {state} in attempt {known.attempt} on dp_rank {known.dp_rank}"
