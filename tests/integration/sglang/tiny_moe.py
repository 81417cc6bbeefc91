"""A random Qwen3-MoE checkpoint that is small, peaky, and written without importing the model's code."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, **overrides: int) -> Path:
    """Write config and float32 weights; `overrides` replace entries of CONFIG. Returns the folder."""
    config = {**CONFIG, **overrides}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, torch.Generator().manual_seed(0)), folder / "model.safetensors")
    return folder


def _weights(config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale * shape[-1] ** -0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        # Large logits: greedy decoding wanders over the vocabulary instead of repeating one token.
        "lm_head.weight": random(vocab, hidden, scale=3.0),
    }
    for layer in range(config["num_hidden_layers"]):
        weights.update(_layer_weights(config, f"model.layers.{layer}.", random))
    return weights


def _layer_weights(config: dict, prefix: str, random) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    hidden, head_dim, inter = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    num_rows = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    num_rows["v"] = num_rows["k"]
    weights = {
        f"self_attn.{name}_proj.weight": random(rows * head_dim, hidden) for name, rows in num_rows.items()
    }
    weights["self_attn.o_proj.weight"] = random(hidden, num_rows["q"] * head_dim)
    weights["self_attn.q_norm.weight"] = torch.full((head_dim,), 2.0)
    weights["self_attn.k_norm.weight"] = torch.full((head_dim,), 2.0)
    weights["input_layernorm.weight"] = torch.ones(hidden)
    weights["post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["mlp.gate.weight"] = random(config["num_experts"], hidden, scale=3.0)
    for expert in range(config["num_experts"]):
        for name, shape in {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}.items():
            weights[f"mlp.experts.{expert}.{name}_proj.weight"] = random(*shape, scale=2.0)
    return {prefix + name: tensor.contiguous() for name, tensor in weights.items()}
