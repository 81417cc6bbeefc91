"""A controller's hold on a running rollout step: what is unfinished where, and moves between ranks.

    control = StepControl()
    step = asyncio.create_task(run_step(..., control=control))
    control.unfinished()              # any time; empty before the step began and after it ended
    control.move("7/p3/0", 2)         # continues on dp_rank 2, from its tokens so far

All of it runs in the step's event loop, and a move only orders: the attempt on the old rank is aborted, and
once its last tokens are here the response goes on at once. What finishes before the abort lands is finished.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedResponse:
    """A response of the step at the moment of asking."""

    response_id: str
    prompt_id: str
    dp_rank: int | None
    """None: it waits for a place and is on no rank."""
    moves_to: int | None
    """The rank that it will be on next, where a move is under way."""
    prompt_tokens: int
    generated_tokens: int
    """Over all its attempts."""
    cap_tokens: int
    has_begun: bool
    """It has got a token on this rank. One that has not may be queued there, and has no KV tokens yet."""


class StepControl:
    """Made by the controller and given to `run_step`, for one step."""

    def __init__(self) -> None:
        self._list: Callable[[], list[UnfinishedResponse]] = list
        self._move: Callable[[str, int], bool] | None = None

    def unfinished(self) -> list[UnfinishedResponse]:
        """The unfinished responses, in the order of the requests."""
        return self._list()

    def move(self, response_id: str, dp_rank: int) -> bool:
        """Order a move; a later order replaces it. One that waits goes there when it is next sent.

        False, and nothing happens: the response has finished, is on that rank, or the step does not run.
        Raises ValueError for a response that is not of this step or a rank outside the group.
        """
        return self._move is not None and self._move(response_id, dp_rank)

    def attach(
        self, unfinished: Callable[[], list[UnfinishedResponse]], move: Callable[[str, int], bool]
    ) -> None:
        """The step has begun."""
        assert self._move is None, "a control belongs to one running step"
        self._list, self._move = unfinished, move

    def detach(self) -> None:
        """The step has ended."""
        self._list, self._move = list, None
