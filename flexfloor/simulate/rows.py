"""Collects the iterations of a simulated step: a row as long as nothing but the context changes. PURE."""

import numpy as np
from numpy.typing import NDArray

from flexfloor.iterations import StepIterations


class Rows:
    """Rows of a StepIterations, in order."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._repeats: list[int] = []
        self._is_member: list[NDArray[np.bool_]] = []
        self._num_running: list[NDArray[np.int64]] = []
        self._context_tokens: list[NDArray[np.int64]] = []
        self._prefill_tokens: list[NDArray[np.int64]] = []
        self._none = np.zeros(num_ranks, dtype=np.int64)
        self._is_open = False

    def decode(
        self,
        repeats: int,
        *,
        is_member: NDArray[np.bool_],
        num_running: NDArray[np.int64],
        context_tokens: NDArray[np.int64],
        is_same: bool,
    ) -> None:
        """`context_tokens` are those of the first of the iterations; `is_same`: the last row just goes on."""
        if self._is_open and is_same:
            self._repeats[-1] += repeats
            return
        self._add(repeats, is_member, num_running.copy(), context_tokens.copy(), self._none)
        self._is_open = True

    def prefill(
        self,
        *,
        is_member: NDArray[np.bool_],
        num_running: NDArray[np.int64],
        context_tokens: NDArray[np.int64],
        prefill_tokens: NDArray[np.int64],
    ) -> None:
        """One iteration in which some rank prefills; the arrays are kept."""
        self._add(1, is_member, num_running, context_tokens, prefill_tokens)

    def finish(self, num_retractions: int) -> StepIterations:
        self._close()
        shape = (len(self._repeats), self._num_ranks)
        return StepIterations(
            repeats=np.array(self._repeats, dtype=np.int64),
            is_member=np.array(self._is_member, dtype=np.bool_).reshape(shape),
            num_running=np.array(self._num_running, dtype=np.int64).reshape(shape),
            context_tokens=np.array(self._context_tokens, dtype=np.int64).reshape(shape),
            prefill_tokens=np.array(self._prefill_tokens, dtype=np.int64).reshape(shape),
            num_retractions=num_retractions,
        )

    def _add(
        self,
        repeats: int,
        is_member: NDArray[np.bool_],
        num_running: NDArray[np.int64],
        context_tokens: NDArray[np.int64],
        prefill_tokens: NDArray[np.int64],
    ) -> None:
        self._close()
        self._repeats.append(repeats)
        self._is_member.append(is_member)
        self._num_running.append(num_running)
        self._context_tokens.append(context_tokens)
        self._prefill_tokens.append(prefill_tokens)

    def _close(self) -> None:
        """Every iteration adds a token to each response: the row gets the context of its middle."""
        if self._is_open:
            self._context_tokens[-1] += self._num_running[-1] * (self._repeats[-1] - 1) // 2
        self._is_open = False
