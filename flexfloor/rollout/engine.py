"""What the dispatcher needs of an engine, and the ways in which an attempt can fail.

`EngineClient` is the real one; tests hand in their own.
"""

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from flexfloor.errors import FlexfloorError
from flexfloor.types import FinishReason, ResponseRequest


class ResponseLost(FlexfloorError):
    """An attempt ended without a finish reason: connection lost, silence, or an answer that makes no sense.

    What arrived before stays good; the response is continued by another attempt.
    """


class RankGone(ResponseLost):
    """The rank of an attempt has died. Nobody's fault but the rank's: it does not count as an attempt."""

    def __init__(self, dp_rank: int, message: str) -> None:
        self.dp_rank = dp_rank
        super().__init__(message)


class AttemptsExhausted(FlexfloorError):
    """A response was lost in every attempt it had; the text tells what ended each."""


class EngineRefused(FlexfloorError):
    """The engine refused a request for what it asks; another attempt would be refused as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one response since the last chunk. `len(token_ids) == len(logprobs)` or it is refused."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural logs, one for each of `token_ids`."""
    weight_version: int
    finish_reason: FinishReason | None = None
    """Set in the last chunk only."""
    message: str = ""
    """The engine's own words, with `FinishReason.abort`."""


_RANK_GONE = re.compile(r"flexfloor: dp rank (\d+) lost")


def gone_rank(chunk: Chunk) -> int | None:
    """The dead rank that the server ended this attempt for; None for every other chunk."""
    found = _RANK_GONE.match(chunk.message) if chunk.finish_reason is FinishReason.abort else None
    return None if found is None else int(found[1])


class Engine(Protocol):
    """One server: one EP group."""

    def generate_stream(
        self, request: ResponseRequest, *, dp_rank: int, attempt: int
    ) -> AsyncGenerator[Chunk, None]:
        """Draw at most `max_response_tokens` tokens after `prompt_token_ids` on that rank.

        Closing the iterator early ends the request. Raises ResponseLost or EngineRefused; a stream that ends
        without a finish reason counts as lost.
        """
        ...

    async def abort(self, response_id: str | None = None) -> None:
        """End all attempts of a response, or of every response: their streams finish with an abort.

        Tokens that come with it are good, and the one that would stop the response is not among them.
        """
        ...
