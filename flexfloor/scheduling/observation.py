"""A finished response as length prediction sees it. PURE."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from flexfloor.types import FinishReason, Response


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthObservation:
    """The length of one response. Prompt ids mean something within their dataset only."""

    dataset: str
    prompt_id: str
    response_id: str
    """Unique within its run: one that is drawn again replaces the one before."""
    run_id: str
    rollout_step: int
    weight_version: int
    pass_index: int
    """Which pass over the dataset, from 0 within the run."""
    num_tokens: int
    prompt_tokens: int
    """0: unknown."""
    is_truncated: bool
    """`cap_tokens` ended it, so it would have become at least this long."""
    cap_tokens: int

    def __post_init__(self) -> None:
        if not (self.dataset and self.prompt_id and self.response_id and self.run_id):
            raise ValueError(f"an observation without a name: {self}")
        if min(self.rollout_step, self.pass_index, self.num_tokens, self.prompt_tokens) < 0:
            raise ValueError(f"an observation with a negative number: {self}")
        if self.cap_tokens < 1 or self.num_tokens > self.cap_tokens:
            raise ValueError(
                f"response {self.response_id}: num_tokens={self.num_tokens} with cap_tokens={self.cap_tokens}"
            )

    @property
    def visit(self) -> tuple[str, int]:
        """The pass that this was part of, unique over runs."""
        return self.run_id, self.pass_index


def observation_of(response: Response, *, dataset: str, run_id: str, pass_index: int) -> LengthObservation:
    """What a finished response says of its prompt; ValueError for an aborted one, which says too little."""
    if response.finish_reason is FinishReason.abort:
        raise ValueError(f"response {response.response_id} was aborted: its length is unknown")
    return LengthObservation(
        dataset=dataset,
        prompt_id=response.prompt_id,
        response_id=response.response_id,
        run_id=run_id,
        rollout_step=response.rollout_step,
        weight_version=response.weight_version,
        pass_index=pass_index,
        num_tokens=response.num_tokens,
        prompt_tokens=len(response.prompt_token_ids),
        is_truncated=response.is_truncated,
        cap_tokens=response.cap_tokens,
    )


def by_step(observations: Iterable[LengthObservation]) -> Iterator[list[LengthObservation]]:
    """Observations of one rollout step after the other; those of a step stand together in the input."""
    for _, step in groupby(observations, key=lambda one: (one.run_id, one.rollout_step)):
        yield list(step)
