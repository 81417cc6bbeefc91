"""Prompts are loaded, tokenised and checked before anything starts; errors name the prompt and the key."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.config import TrainConfig
from flexfloor.driver.prompts import load_tokenized_prompts, load_tokenizer
from flexfloor.errors import ConfigError, DataError


def make_config(*overrides: str) -> TrainConfig:
    return to_train_config(compose(["experiment=quickstart", "run_dir=unused", *overrides]))


def jsonl(folder: Path, records: Sequence[dict[str, object]]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_arithmetic_prompts_come_tokenised_and_each_once() -> None:
    config = make_config("data.num_prompts=40")
    prompts = load_tokenized_prompts(config, load_tokenizer(config.model))
    assert len({item.prompt.prompt_id for item in prompts}) == 40
    tokenizer = load_tokenizer(config.model)
    assert all(tokenizer.decode(item.token_ids) == item.prompt.text for item in prompts)


def test_fields_can_have_other_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"question": "9%4:", "solution": "5,1.", "key": "q1"}])
    config = make_config(
        "data=jsonl",
        f"data.path={path}",
        "data.prompt_field=question",
        "data.answer_field=solution",
        "data.id_field=key",
        "data.reward=exact",
    )
    (item,) = load_tokenized_prompts(config, load_tokenizer(config.model))
    assert (item.prompt.prompt_id, item.prompt.answer, len(item.token_ids)) == ("q1", "5,1.", 4)


def test_a_prompt_that_is_too_long_is_named_with_the_key(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"prompt": "1" * 30, "answer": "1", "id": "long-one"}])
    config = make_config("data=jsonl", f"data.path={path}", "data.reward=exact")
    with pytest.raises(DataError, match=r"long-one has 30 tokens.*rollout\.max_prompt_tokens=16.*Fix:"):
        load_tokenized_prompts(config, load_tokenizer(config.model))


def test_chat_messages_need_a_chat_template(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "9%4:"}], "answer": "1"}
    path = jsonl(tmp_path, [record])
    config = make_config("data=jsonl", f"data.path={path}", "data.reward=exact")
    with pytest.raises(ConfigError, match=r"data\.messages_field.*no chat template.*Fix:"):
        load_tokenized_prompts(config, load_tokenizer(config.model))
