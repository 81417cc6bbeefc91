"""Where a broken forward pass cannot simply be made again, its requests are prefilled again.

A recurrent state has taken a part of the broken pass and would take it twice. So the pass is made again only
because the other ranks count on this one, its result is thrown away, and at the next loop top all requests
of this rank go back to the queue with the tokens that they have, as in SGLang's pause with retraction.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)


class PrefillAgain:
    """Example:
    again.discard(result)               # of a pass that was broken
    again.is_discarded(result)          # True: SGLang must not take tokens from it
    again.settle()                      # at the loop top: back to the queue
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._discarded: Any = None

    def discard(self, result: Any) -> None:
        """Take no token from this pass, which was the last one."""
        self._discarded = result

    def is_discarded(self, result: Any) -> bool:
        """Whether SGLang is about to take tokens from the discarded pass."""
        return result is not None and result is self._discarded

    def settle(self) -> None:
        """Put this rank's requests back into its queue, if a pass was discarded."""
        if self._discarded is None:
            return
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        # It also drains the results of overlapped passes: those before the broken one are good.
        num_waiting = len(self._scheduler.waiting_queue)
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        self._discarded = None
        num_requests = len(self._scheduler.waiting_queue) - num_waiting
        logger.warning("flexfloor %d requests are prefilled again after a broken pass", num_requests)
