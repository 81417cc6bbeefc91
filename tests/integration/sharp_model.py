"""A tiny random model that is sure of something, so that rounding cannot choose its tokens."""

from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file

from flexfloor.data.arithmetic import build_tokenizer
from flexfloor.data.tiny_moe import create_tiny_moe

BIG: Final = {
    "num_layers": 4,
    "hidden_size": 256,
    "moe_intermediate_size": 1024,
    "num_experts": 32,
    "top_k": 4,
}
"""Experts of 3 MB, 100 MB of them a rank on 4 ranks."""


def sharp_tiny_moe(folder: Path, *, seed: int = 0, **shape: Any) -> Path:
    """Random weights scaled up; routing differs between tokens. Returns the folder."""
    sizes = {"num_layers": 2, "hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, **shape}
    create_tiny_moe(folder, tokenizer=build_tokenizer(), seed=seed, **sizes)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            tensor *= 16.0 if name == "lm_head.weight" else 4.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
