"""reasoning-gym tasks: made in one process, scored in another."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from flexfloor.data.reward_pool import RewardPool
from flexfloor.data.rewards import RewardSpec
from flexfloor.data.sources import check_source, load_prompts
from flexfloor.errors import DataError, RewardError
from flexfloor.types import Prompt

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

# word_ladder and ransom_note walk over sets; base_conversion does not survive JSON; arc_1d scores on its own.
TASKS = ("chain_sum", "word_ladder", "ransom_note", "base_conversion", "arc_1d")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[Prompt]]:
    with ThreadPoolExecutor(2) as threads:
        load = partial(load_prompts, "reasoning_gym", num_prompts=3, seed=11)
        return dict(zip(TASKS, threads.map(lambda task: load(task=task), TASKS), strict=True))


@pytest.fixture(scope="module")
def pool() -> RewardPool:
    with RewardPool(RewardSpec(name="reasoning_gym"), num_workers=1, timeout_s=DEADLINE_S) as pool:
        yield pool


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answer_scores_one(
    task: str, prompts: dict[str, list[Prompt]], pool: RewardPool
) -> None:
    assert len(prompts[task]) == 3
    for prompt in prompts[task]:
        assert prompt.source == task
        tagged = f"I think <answer>no</answer>, rather <answer> {prompt.answer} </answer>"
        texts = (prompt.answer, tagged, "", "certainly not the answer")
        rewards = [pool.submit(prompt, "r", text).result(DEADLINE_S) for text in texts]
        assert rewards[:2] == [1.0, 1.0]
        assert max(rewards[2:]) < 1.0


def test_another_process_makes_the_same_prompts(prompts: dict[str, list[Prompt]]) -> None:
    assert load_prompts("reasoning_gym", task="word_ladder", num_prompts=3, seed=11) == prompts["word_ladder"]


def test_a_prompt_that_is_not_the_rebuilt_item_is_an_error(
    prompts: dict[str, list[Prompt]], pool: RewardPool
) -> None:
    prompt = prompts["chain_sum"][0]
    moved = replace(prompt, metadata={**prompt.metadata, "index": 1})
    with pytest.raises(RewardError, match="task 'chain_sum' did not rebuild this item"):
        pool.submit(moved, "r", prompt.answer).result(DEADLINE_S)
    foreign = replace(prompt, metadata={"task": "chain_sum"})
    with pytest.raises(RewardError, match="does not come from source=reasoning_gym"):
        pool.submit(foreign, "r", prompt.answer).result(DEADLINE_S)


def test_a_presented_prompt_is_scored_like_the_bare_one(pool: RewardPool) -> None:
    options = {"min_terms": 2, "max_terms": 2}
    (prompt,) = load_prompts(
        "reasoning_gym",
        task="chain_sum",
        task_options=options,
        num_prompts=1,
        instruction="Write the answer in <answer> tags.",
        as_chat=True,
    )
    assert prompt.messages is not None
    assert prompt.messages[0]["content"].endswith("Write the answer in <answer> tags.")
    assert pool.submit(prompt, "r", prompt.answer).result(DEADLINE_S) == 1.0


def test_unknown_tasks_and_options_are_refused_before_anything_is_made() -> None:
    with pytest.raises(DataError, match=r"task='chain_sums'.*: no such task\. Fix: use one of .*chain_sum"):
        check_source("reasoning_gym", task="chain_sums", num_prompts=2)
    with pytest.raises(DataError, match=r"task_options=\{'terms': 2\}: TypeError: .*'terms'.* Fix: "):
        check_source("reasoning_gym", task="chain_sum", task_options={"terms": 2}, num_prompts=2)
