"""Compares a Hugging Face checkpoint's config.json with what the model group states. Reads JSON only."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexfloor.config.checks import require
from flexfloor.config.schema import Dtype, ModelConfig
from flexfloor.errors import ConfigError
from flexfloor.model_memory import NUM_EXPERTS_NAMES, expert_bytes, kv_bytes_per_token


def check_hf_checkpoint(model: ModelConfig) -> None:
    config = _read_config(model.path or "")
    for name, found in _stated_by(config, model.dtype):
        stated = getattr(model, name)
        problem = f"config.json in model.path={model.path} makes it {found}"
        require(
            stated == found,
            f"model.{name}",
            stated,
            problem,
            f"set model.{name}={found}, or another model.path",
        )
    longest = config.get("max_position_embeddings", model.context_tokens)
    problem = f"config.json in model.path={model.path} allows {longest}"
    fix = f"set model.context_tokens to at most {longest}"
    require(model.context_tokens <= longest, "model.context_tokens", model.context_tokens, problem, fix)


def _read_config(path: str) -> dict[str, Any]:
    folder = Path(path).expanduser()
    fix = "set model.path to a Hugging Face checkpoint folder on this machine"
    require(folder.is_dir(), "model.path", path, "there is no such folder", fix)
    file = folder / "config.json"
    require(file.is_file(), "model.path", path, "the folder has no config.json", fix)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", path, f"config.json cannot be read: {error}", fix) from error
    require(isinstance(config, dict), "model.path", path, "config.json holds no JSON object", fix)
    return dict(config)


def _stated_by(config: dict[str, Any], dtype: Dtype) -> Iterator[tuple[str, int]]:
    """(field of the model group, what config.json makes it); what the file leaves out is not compared."""
    if "num_hidden_layers" in config:
        yield "num_layers", config["num_hidden_layers"]
    for name in NUM_EXPERTS_NAMES:
        if name in config:
            yield "num_experts", config[name]
    if "num_experts_per_tok" in config:
        yield "num_active_experts", config["num_experts_per_tok"]
    yield from _sizes(config, dtype.num_bytes)


def _sizes(config: dict[str, Any], item_bytes: int) -> Iterator[tuple[str, int]]:
    if {"hidden_size", "moe_intermediate_size"} <= config.keys():
        sizes = config["hidden_size"], config["moe_intermediate_size"]
        yield "expert_bytes", expert_bytes(*sizes, item_bytes)
    if {"num_hidden_layers", "num_key_value_heads", "head_dim"} <= config.keys():
        heads = config["num_key_value_heads"], config["head_dim"]
        yield "kv_bytes_per_token", kv_bytes_per_token(config["num_hidden_layers"], *heads, item_bytes)
