"""Ledger records: what the rollout writes about each response, and what resume, report and trainer read.

A ledger is a sequence of these structs, msgpack-encoded as arrays whose first element is the tag. The order
of fields is the format: add new ones at the end with a default, and raise `LEDGER_FORMAT_VERSION` for
anything else. Times are seconds on the driver's monotonic clock; `StepOpened` ties that clock to Unix time.
"""

from msgspec import Struct

from flexfloor.types import FinishReason

LEDGER_FORMAT_VERSION = 1

_MOVED = "moved to dp_rank "


class StepOpened(Struct, frozen=True, array_like=True, tag="open"):
    """First record of every ledger file: one file is one rollout step under one weight_version."""

    format_version: int
    rollout_step: int
    weight_version: int
    num_responses: int
    at_s: float
    at_unix_s: float
    weight_checksum: str = ""
    """Of the weights behind `weight_version`; empty where nobody knew it."""


class Submitted(Struct, frozen=True, array_like=True, tag="sub"):
    """An attempt went to a rank. Attempt 1 carries the request; later ones leave `prompt_token_ids` empty."""

    response_id: str
    attempt: int
    dp_rank: int
    at_s: float
    prompt_id: str
    sample_index: int
    cap_tokens: int
    """Most tokens this response may have: least of `max_response_tokens` and the room in the context."""
    sampling_seed: int
    prompt_token_ids: tuple[int, ...]


class Progress(Struct, frozen=True, array_like=True, tag="tok"):
    """New tokens of an attempt. `offset_tokens` counts from the start of the response, over all attempts."""

    response_id: str
    attempt: int
    offset_tokens: int
    token_ids: list[int]
    logprobs: list[float]


class Finished(Struct, frozen=True, array_like=True, tag="fin"):
    """The response is complete. Its tokens are those of its `Progress` records."""

    response_id: str
    attempt: int
    dp_rank: int
    weight_version: int
    finish_reason: FinishReason
    num_tokens: int
    cap_tokens: int
    """The cap that bound; below the submitted one where the engine ran out of KV room first."""
    started_at_s: float
    finished_at_s: float


class Aborted(Struct, frozen=True, array_like=True, tag="abt"):
    """An attempt ended without finishing the response; the tokens so far stay and are continued from."""

    response_id: str
    attempt: int
    dp_rank: int
    at_s: float
    num_tokens: int
    reason: str

    @property
    def moved_to(self) -> int | None:
        """The rank that a planned move took the response to; None where the attempt was lost."""
        is_move = self.reason.startswith(_MOVED)
        return int(self.reason.removeprefix(_MOVED)) if is_move else None


def moved_reason(dp_rank: int) -> str:
    """`Aborted.reason` of an attempt that was ended to continue on another rank."""
    return f"{_MOVED}{dp_rank}"


LedgerRecord = StepOpened | Submitted | Progress | Finished | Aborted
