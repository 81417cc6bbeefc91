"""The requests that the server has sent to its ranks and not yet answered. PURE.

What is over is seen from SGLang's own table of live requests, not from hooks: a request leaves that table at
a finish, an abort, a lost client or an error alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request on its way or on its rank."""

    request_id: str
    dp_rank: int | None
    """None: SGLang chooses it, and says so only with the answer."""
    prompt_tokens: int
    cap_tokens: int
    state: Any
    """SGLang's, whose `output_ids` grow while the response runs."""

    @property
    def num_tokens(self) -> int:
        """Response tokens that have arrived here; a response that is not streamed reports every 50."""
        return len(self.state.output_ids)


class RequestTracker:
    """Example:
    tracker.send(request)
    for request in tracker.settle(tokenizer_manager.rid_to_state): ...   # those that are over
    """

    def __init__(self) -> None:
        self._sent: dict[str, SentRequest] = {}
        self._over: list[SentRequest] = []
        self._tokens_of_over = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[SentRequest]:
        return iter(self._sent.values())

    @property
    def num_tokens(self) -> int:
        """Response tokens since the server started, of requests that run as well."""
        return self._tokens_of_over + sum(request.num_tokens for request in self)

    def send(self, request: SentRequest) -> None:
        """The same id again: the request before it is over, for SGLang has one at a time."""
        before = self._sent.pop(request.request_id, None)
        if before is not None:
            self._end(before)
        self._sent[request.request_id] = request

    def settle(self, live: Mapping[str, Any]) -> list[SentRequest]:
        """Those that are over and were not given before; `live` is SGLang's table by request id."""
        for request in [one for one in self if live.get(one.request_id) is not one.state]:
            del self._sent[request.request_id]
            self._end(request)
        over, self._over = self._over, []
        return over

    def _end(self, request: SentRequest) -> None:
        self._tokens_of_over += request.num_tokens
        self._over.append(request)
