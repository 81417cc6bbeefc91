"""A model whose responses are as long as their prompt says, so that a test knows which rank works longest.

A bigram model in the shape of a Qwen3-MoE: attention and experts add nothing, so the next token depends on
the last one only, by a table of probabilities in the output matrix.

    prompt "...b"   response "1111..." up to the cap
    prompt "...c"   response of d and 2, ten tokens in the mean
"""

import json
import math
from pathlib import Path

from safetensors.torch import load_file, save_file

from flexfloor.data.arithmetic import EOS, TOKEN_IDS, build_tokenizer
from flexfloor.data.tiny_moe import create_tiny_moe

LONG, SHORT = "b", "c"
HIDDEN_SIZE, NUM_LAYERS, HEAD_DIM, NUM_KV_HEADS, INTERMEDIATE_SIZE = 64, 2, 16, 2, 64
_NEXT = {
    LONG: {"1": 1.0},
    "1": {"1": 1.0},
    SHORT: {"d": 1.0},
    "d": {"d": 0.45, "2": 0.45, EOS: 0.1},
    "2": {"d": 0.45, "2": 0.45, EOS: 0.1},
}
_NEVER = math.exp(-30.0)


def write_model(folder: Path, *, context_tokens: int) -> Path:
    """Returns the folder, a Hugging Face checkpoint."""
    create_tiny_moe(
        folder,
        tokenizer=build_tokenizer(),
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
        head_dim=HEAD_DIM,
        num_kv_heads=NUM_KV_HEADS,
        moe_intermediate_size=INTERMEDIATE_SIZE,
        seed=0,
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context_tokens}))
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding.zero_().fill_diagonal_(1.0)
    head.zero_()
    # The last norm makes of a unit vector one of this length.
    scale = math.sqrt(HIDDEN_SIZE)
    for last, following in _NEXT.items():
        for token, number in TOKEN_IDS.items():
            head[number, TOKEN_IDS[last]] = math.log(following.get(token, _NEVER)) / scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def model_overrides(folder: Path, *, context_tokens: int) -> list[str]:
    """The `model` group of this checkpoint."""
    return [
        "model=tiny_moe",
        "model.source=hf",
        f"model.path={folder}",
        f"model.context_tokens={context_tokens}",
        f"model.num_layers={NUM_LAYERS}",
        # 3 x hidden x intermediate x 4 bytes; 2 x layers x KV heads x head_dim x 4 bytes
        f"model.expert_bytes={3 * HIDDEN_SIZE * INTERMEDIATE_SIZE * 4}",
        f"model.kv_bytes_per_token={2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4}",
    ]


def write_prompts(path: Path, *, num_prompts: int, long_one: int) -> Path:
    """As jsonl; only prompt number `long_one` has long responses."""
    ends = [LONG if number == long_one else SHORT for number in range(num_prompts)]
    records = [{"prompt": f"{number}{end}", "answer": "2"} for number, end in enumerate(ends)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
