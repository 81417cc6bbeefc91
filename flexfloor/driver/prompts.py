"""Prompts of a run: loaded, tokenised and checked before any process starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flexfloor.config import DataConfig, ModelConfig, TrainConfig
from flexfloor.config.schema import ModelSource
from flexfloor.data.arithmetic import build_tokenizer
from flexfloor.data.records import FieldNames
from flexfloor.data.sources import load_prompts
from flexfloor.errors import ConfigError, DataError
from flexfloor.types import Prompt


class Tokenizer(Protocol):
    """What the driver needs of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt and its token ids."""

    prompt: Prompt
    token_ids: tuple[int, ...]


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of the model; the tiny model's own one does not need the checkpoint."""
    tokenizer: Any
    if model.source is ModelSource.tiny:
        tokenizer = build_tokenizer()
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.path)
    return tokenizer  # type: ignore[no-any-return]


def load_tokenized_prompts(config: TrainConfig, tokenizer: Tokenizer) -> list[TokenizedPrompt]:
    """Every prompt of the run, in the data's order; DataError for one that does not fit."""
    prompts = [
        TokenizedPrompt(prompt, tuple(_token_ids(prompt, tokenizer)))
        for prompt in load_prompts(**_source_arguments(config.data))
    ]
    for prompt in prompts:
        _check_length(prompt, config.rollout.max_prompt_tokens)
    return prompts


def _source_arguments(data: DataConfig) -> dict[str, Any]:
    return {
        "source": data.source.value,
        "path": data.path,
        "fields": FieldNames(
            prompt=data.prompt_field,
            messages=data.messages_field,
            answer=data.answer_field,
            id=data.id_field,
        ),
        "task": data.task,
        "task_options": data.task_options,
        "num_prompts": data.num_prompts,
        "seed": data.seed,
    }


def _token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if prompt.messages is None:
        assert prompt.text is not None
        return tokenizer.encode(prompt.text)
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "data.messages_field",
            prompt.prompt_id,
            "the data has chat messages but the model's tokenizer has no chat template",
            "use a chat model, or give plain text in data.prompt_field",
        )
    text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _check_length(item: TokenizedPrompt, max_prompt_tokens: int) -> None:
    if not item.token_ids:
        raise DataError(f"prompt {item.prompt.prompt_id} has no tokens. Fix: remove it from the data")
    if len(item.token_ids) > max_prompt_tokens:
        raise DataError(
            f"prompt {item.prompt.prompt_id} has {len(item.token_ids)} tokens, more than "
            f"rollout.max_prompt_tokens={max_prompt_tokens}. Fix: raise that key or remove the prompt"
        )
