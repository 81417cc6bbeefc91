"""What an iteration of an EP group costs: the load that decides it, and the clocks that price it. PURE.

In lockstep decode the group is as slow as its fullest rank: the one with most responses sets the per-response
time, the one with most context the attention time. So four numbers describe an iteration.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """One iteration of a group."""

    num_ranks: int
    """Members, whether they have responses or not."""
    num_running: int
    """Responses that decode, over all ranks."""
    max_running: int
    """Of the rank that has most."""
    max_context_tokens: int
    """Prompt and generated tokens of the running responses, on the rank that has most."""


class Clock(Protocol):
    """Seconds, or whatever unit the clock counts in; ratios are what matters."""

    @property
    def name(self) -> str:
        """Stands beside every figure that the clock gave, e.g. `h200` or `neutral`."""
        ...

    def decode_s(self, load: GroupLoad) -> float:
        """One decode iteration."""
        ...

    def prefill_s(self, max_new_tokens: int) -> float:
        """What an iteration takes longer because the fullest rank prefills so many tokens."""
        ...

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        """Stall of the group at a change of membership."""
        ...
