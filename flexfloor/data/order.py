"""The order in which a run walks its prompts.

Rule: pure function of (num_prompts, seed, step_index, batch_size). Nothing is remembered between calls, so a
resumed run needs only its step number.
"""

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """Shuffled passes over `num_prompts` prompts; each pass is a new permutation and holds each prompt once.

    With `drop_last=False` the last batch of a pass may be shorter; with True it is left out, and then the
    `num_prompts % batch_size` prompts that a pass misses differ from pass to pass.
    """

    num_prompts: int
    seed: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts={self.num_prompts}: nothing to order. Fix: load some prompts")

    def steps_per_pass(self, batch_size: int) -> int:
        """Number of batches in one pass; ValueError if there is none."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be positive. Fix: set it to 1 or more")
        whole, rest = divmod(self.num_prompts, batch_size)
        num_steps = whole if self.drop_last else whole + (rest > 0)
        if num_steps == 0:
            raise ValueError(
                f"batch_size={batch_size}: larger than num_prompts={self.num_prompts} with drop_last=True, "
                "so no batch is ever full. Fix: lower batch_size or set drop_last=False"
            )
        return num_steps

    def pass_index(self, step_index: int, batch_size: int) -> int:
        """Which pass a step belongs to, from 0."""
        if step_index < 0:
            raise ValueError(f"step_index={step_index}: steps count from 0. Fix: pass a step of this run")
        return step_index // self.steps_per_pass(batch_size)

    def batch(self, step_index: int, batch_size: int) -> list[int]:
        """Indices of the prompts of one step, each in [0, num_prompts)."""
        pass_index = self.pass_index(step_index, batch_size)
        start = (step_index - pass_index * self.steps_per_pass(batch_size)) * batch_size
        return list(_permutation(self.num_prompts, self.seed, pass_index)[start : start + batch_size])


# Two entries: a look-ahead over the end of a pass alternates between two permutations.
@lru_cache(maxsize=2)
def _permutation(num_prompts: int, seed: int, pass_index: int) -> tuple[int, ...]:
    indices = list(range(num_prompts))
    # Seeding with a string goes through SHA-512: neighbouring seeds and passes are unrelated.
    random.Random(f"prompt-order/{seed}/{pass_index}").shuffle(indices)
    return tuple(indices)
