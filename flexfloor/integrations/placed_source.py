"""slime's data source for one rollout step: every sample that it gives out has a seat, a rank of a server."""

import logging
from typing import Any

from flexfloor.errors import FlexfloorError
from flexfloor.integrations.sample_lengths import SampleLengths
from flexfloor.integrations.slime_fleet import Fleet
from flexfloor.integrations.spread import Seat, Spread

logger = logging.getLogger(__name__)

_ENDED = ("completed", "truncated")
"""Values of slime's Sample.Status of a response that has its end."""


class PlacedSource:
    """Everything but `get_samples` is the inner source's."""

    def __init__(self, inner: Any, *, rollout_step: int, fleet: Fleet, lengths: SampleLengths) -> None:
        self._inner = inner
        self._rollout_step = rollout_step
        self._fleet = fleet
        self._lengths = lengths
        self._spread = Spread(fleet.open_seats())
        self._num_batches = 0
        self._running: dict[int, tuple[Seat, float]] = {}
        """By the sample's identity: slime hands on the very objects that it got."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Groups as the inner source gives them; samples in them that have not ended get their seats."""
        groups: list[list[Any]] = self._inner.get_samples(num_samples)
        samples = [sample for group in groups for sample in group if sample.status.value not in _ENDED]
        if self._num_batches:
            self._look_again()
        self._num_batches += 1
        expected = [self._lengths.expected_tokens(sample) for sample in samples]
        for sample, seat, tokens in zip(samples, self._spread.place(expected), expected, strict=True):
            self._running[id(sample)] = seat, tokens
        return groups

    def seat_of(self, sample: Any) -> Seat | None:
        """None for a sample that came from elsewhere."""
        found = self._running.get(id(sample))
        return found[0] if found else None

    def ended(self, sample: Any) -> None:
        """A sample left its rank. Its length is learnt where the response has its end."""
        found = self._running.pop(id(sample), None)
        if found is None:
            return
        self._spread.finish(*found)
        if sample.status.value in _ENDED:
            self._lengths.finished(
                sample,
                rollout_step=self._rollout_step,
                pass_index=int(getattr(self._inner, "epoch_id", 0)),
                is_truncated=sample.status.value == "truncated",
            )

    def _look_again(self) -> None:
        """A later batch of the step goes to ranks that are still there: another one would have to wake."""
        try:
            self._spread.open(self._fleet.open_seats())
        except (FlexfloorError, ValueError) as error:
            logger.warning("the members are not known, placing on those of before: %s", error)
