"""A Qwen3-MoE checkpoint small enough for a CPU, with random weights, for the quickstart and for tests.

The weights are written under their Hugging Face names directly, without building the model: that takes a
fraction of a second and does not depend on how a version of transformers lays out experts in memory.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flexfloor import left_overs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

# Room for the longest chain of the arithmetic task and what a bad policy adds to it.
_MAX_POSITIONS = 1024
Shape = tuple[int, ...]


def create_tiny_moe(
    path: str | Path,
    *,
    tokenizer: "PreTrainedTokenizerFast",
    num_layers: int = 3,
    hidden_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    num_experts: int = 8,
    top_k: int = 2,
    moe_intermediate_size: int = 128,
    seed: int,
) -> Path:
    """Write config.json, model.safetensors (float32), generation_config.json and the tokenizer to `path`.

    All or nothing: the folder appears under its name when it is complete. Same arguments, same weights.
    Raises FileExistsError if `path` exists (a checkpoint is never overwritten), ValueError for sizes that
    cannot work.
    """
    from transformers import Qwen3MoeConfig

    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists. Fix: remove it or write the checkpoint elsewhere")
    _check_sizes(num_heads, num_kv_heads, num_experts, top_k)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        # There is no dense layer, but the configuration wants its width.
        intermediate_size=4 * hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=moe_intermediate_size,
        norm_topk_prob=True,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    _write_atomically(path, config, _random_weights(config, seed), tokenizer)
    return path


def _check_sizes(num_heads: int, num_kv_heads: int, num_experts: int, top_k: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}. Fix: make it so"
        )
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} of num_experts={num_experts}. Fix: set top_k from 1 to num_experts")


def _random_weights(config: "Qwen3MoeConfig", seed: int) -> "dict[str, torch.Tensor]":
    """Norms are 1, all else is normal with the configuration's `initializer_range`.

    That includes the row of <pad>, which transformers would zero: should <pad> ever be sampled, normalising a
    zero vector multiplies the row's gradient about a thousandfold.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(config):
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * config.initializer_range
    return weights


def _shapes(config: "Qwen3MoeConfig") -> Iterator[tuple[str, Shape]]:
    """Names and shapes of all weights: [out, in] for matrices, [size] for norms."""
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (config.hidden_size,)
        yield from _attention_shapes(prefix + "self_attn.", config)
        yield prefix + "post_attention_layernorm.weight", (config.hidden_size,)
        yield from _expert_shapes(prefix + "mlp.", config)
    yield "model.norm.weight", (config.hidden_size,)
    yield "lm_head.weight", (config.vocab_size, config.hidden_size)


def _attention_shapes(prefix: str, config: "Qwen3MoeConfig") -> Iterator[tuple[str, Shape]]:
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    yield prefix + "q_proj.weight", (q_size, config.hidden_size)
    yield prefix + "k_proj.weight", (kv_size, config.hidden_size)
    yield prefix + "v_proj.weight", (kv_size, config.hidden_size)
    yield prefix + "o_proj.weight", (config.hidden_size, q_size)
    yield prefix + "q_norm.weight", (config.head_dim,)
    yield prefix + "k_norm.weight", (config.head_dim,)


def _expert_shapes(prefix: str, config: "Qwen3MoeConfig") -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate.weight", (config.num_experts, config.hidden_size)
    for expert in range(config.num_experts):
        for name in ("gate_proj", "up_proj"):
            shape = (config.moe_intermediate_size, config.hidden_size)
            yield f"{prefix}experts.{expert}.{name}.weight", shape
        yield f"{prefix}experts.{expert}.down_proj.weight", (config.hidden_size, config.moe_intermediate_size)


def _write_atomically(
    path: Path,
    config: "Qwen3MoeConfig",
    weights: "dict[str, torch.Tensor]",
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, since a rename must stay on one file system.
    left_overs.remove_left_folders(path.parent, prefix=f".{path.name}.")
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    lock = left_overs.hold(draft)
    try:
        _write(draft, config, weights, tokenizer)
        (draft / left_overs.LOCK_NAME).unlink()
        # mkdtemp makes it private to this user; a server may run as another.
        draft.chmod(0o755)
        os.rename(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _write(
    folder: Path,
    config: "Qwen3MoeConfig",
    weights: "dict[str, torch.Tensor]",
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
