"""Order of prompts: each once per pass, whatever the batch size and wherever a run resumes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.data.order import PromptOrder

NUM_PROMPTS = st.integers(1, 60)
BATCH_SIZE = st.integers(1, 70)
SEED = st.integers(0, 2**32)


@given(NUM_PROMPTS, BATCH_SIZE, SEED, st.integers(0, 4))
def test_each_prompt_exactly_once_per_pass(
    num_prompts: int, batch_size: int, seed: int, pass_index: int
) -> None:
    order = PromptOrder(num_prompts=num_prompts, seed=seed)
    num_steps = order.steps_per_pass(batch_size)
    steps = range(pass_index * num_steps, (pass_index + 1) * num_steps)
    batches = [order.batch(step, batch_size) for step in steps]
    assert sorted(index for batch in batches for index in batch) == list(range(num_prompts))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert len(batches[-1]) == num_prompts - batch_size * (num_steps - 1)
    assert {order.pass_index(step, batch_size) for step in steps} == {pass_index}


@given(NUM_PROMPTS, SEED, st.data())
def test_drop_last_gives_full_batches_of_distinct_prompts(
    num_prompts: int, seed: int, data: st.DataObject
) -> None:
    batch_size = data.draw(st.integers(1, num_prompts))
    order = PromptOrder(num_prompts=num_prompts, seed=seed, drop_last=True)
    batches = [order.batch(step, batch_size) for step in range(order.steps_per_pass(batch_size))]
    assert all(len(batch) == batch_size for batch in batches)
    assert len(batches) == num_prompts // batch_size
    indices = [index for batch in batches for index in batch]
    assert len(set(indices)) == len(indices)


@given(NUM_PROMPTS, BATCH_SIZE, SEED, st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_random_access_equals_walking(num_prompts: int, batch_size: int, seed: int, steps: list[int]) -> None:
    walked = PromptOrder(num_prompts=num_prompts, seed=seed)
    sequence = [walked.batch(step, batch_size) for step in range(max(steps) + 1)]
    for step in steps:
        assert PromptOrder(num_prompts=num_prompts, seed=seed).batch(step, batch_size) == sequence[step]


def test_passes_and_seeds_give_different_permutations() -> None:
    orders = [PromptOrder(num_prompts=50, seed=seed) for seed in (0, 1)]
    permutations = [tuple(order.batch(step, 50)) for order in orders for step in range(3)]
    assert len(set(permutations)) == 6


def test_the_order_does_not_change_between_releases() -> None:
    # A resumed run of an older release must go on where it was.
    assert PromptOrder(num_prompts=8, seed=5).batch(0, 8) == [0, 7, 5, 3, 4, 6, 2, 1]


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_prompts=0: nothing to order\. Fix: "):
        PromptOrder(num_prompts=0, seed=0)
    order = PromptOrder(num_prompts=4, seed=0, drop_last=True)
    with pytest.raises(
        ValueError, match=r"batch_size=5: larger than num_prompts=4 with drop_last=True.* Fix: "
    ):
        order.batch(0, 5)
    with pytest.raises(ValueError, match=r"batch_size=0: must be positive\. Fix: "):
        order.batch(0, 0)
    with pytest.raises(ValueError, match=r"step_index=-1: steps count from 0"):
        order.batch(-1, 2)
