"""The iterations of a rollout step: who was in the group and what each rank had to do. PURE.

A rank records 20 bytes an iteration. Ranks of one group run their iterations in lockstep, so the k-th record
of a membership epoch is the same iteration on each of its members, and the rows of a step line up without a
clock. With them a schedule that really ran can be priced under any clock.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECORD = np.dtype(
    [
        ("membership_epoch", "<u4"),
        ("context_tokens", "<u4"),  # KV tokens that the responses that decode attend to
        ("prefill_tokens", "<u4"),  # new tokens that were prefilled; a rank that prefills does not decode
        ("num_running", "<u2"),  # responses that decode
        ("num_retracted", "<u2"),  # responses thrown back since the last record, for want of KV room
        ("took_us", "<u4"),  # since this rank's last record, parking and empty loops included; 0 in its first
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIterations:
    """Iterations of a step in order; a row stands for `repeats` iterations that differ only in context.

    Arrays by rank are [num_rows, num_ranks]; a rank outside the group has zeros.
    """

    repeats: NDArray[np.int64]
    """[num_rows]; all ones for a recorded step. Context is then that of the middle of the row."""
    is_member: NDArray[np.bool_]
    num_running: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    prefill_tokens: NDArray[np.int64]
    num_retractions: int
    seconds: NDArray[np.float64] | None = None
    """[num_rows], what each iteration took on the fastest member's record; None where it was not measured."""

    def __post_init__(self) -> None:
        rows = self.repeats.shape[0]
        for name in ("is_member", "num_running", "context_tokens", "prefill_tokens"):
            shape = getattr(self, name).shape
            if len(shape) != 2 or shape[0] != rows:
                raise ValueError(f"{name} is {shape}, repeats has {rows} rows")

    @property
    def num_ranks(self) -> int:
        return int(self.is_member.shape[1])

    @property
    def num_iterations(self) -> int:
        return int(self.repeats.sum())

    @property
    def worker_iterations(self) -> int:
        return int((self.is_member.sum(axis=1) * self.repeats).sum())

    @property
    def idle_worker_iterations(self) -> int:
        """Those in which a member had no tokens of its own and only served its experts."""
        idle = self.is_member & (self.num_running == 0) & (self.prefill_tokens == 0)
        return int((idle.sum(axis=1) * self.repeats).sum())

    @property
    def num_switches(self) -> int:
        return int((self.is_member[1:] != self.is_member[:-1]).any(axis=1).sum())
