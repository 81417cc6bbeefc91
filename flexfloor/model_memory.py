"""Sizes of a mixture-of-experts model, and what one rank of an EP group holds of it. PURE.

Standard library only: the configuration checks its presets by these formulas, and the engine's processes,
which never load the configuration, use them too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
"""How a config.json may call the number of routed experts."""

_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "mlp_only_layers": ([], (), None),
    "decoder_sparse_step": (1, None),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
    "quantization_config": (None,),
}
"""What a config.json may say without weights that the formulas below do not count."""


class ModelSizes(Protocol):
    """What memory depends on; both `model` presets and ModelShape have it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_bytes(self) -> int:
        """Of one logical expert in one layer."""
        ...

    @property
    def dense_bytes(self) -> int:
        """Of everything that every rank holds whole."""
        ...

    @property
    def kv_bytes_per_token(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a model whose layers are all grouped-query attention and routed experts (Qwen3-MoE)."""

    num_layers: int
    num_experts: int
    hidden_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype_bytes: int
    kv_dtype_bytes: int
    tie_embeddings: bool = False

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], dtype_bytes: int, kv_dtype_bytes: int | None = None
    ) -> "ModelShape":
        """From the content of a config.json; ValueError where the model has weights not counted here."""
        if config.get("model_type") != "qwen3_moe":
            raise ValueError(f"model_type={config.get('model_type')!r}: sizes are known for qwen3_moe only")
        for name, harmless in _WITHOUT_EFFECT.items():
            if config.get(name) not in harmless:
                raise ValueError(f"{name}={config[name]!r}: weights of this kind are not counted")
        heads, hidden_size = _number(config, "num_attention_heads"), _number(config, "hidden_size")
        return cls(
            num_layers=_number(config, "num_hidden_layers"),
            num_experts=_number(config, *NUM_EXPERTS_NAMES),
            hidden_size=hidden_size,
            moe_intermediate_size=_number(config, "moe_intermediate_size"),
            num_attention_heads=heads,
            num_kv_heads=_number(config, "num_key_value_heads"),
            head_dim=config.get("head_dim") or hidden_size // heads,
            vocab_size=_number(config, "vocab_size"),
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=kv_dtype_bytes or dtype_bytes,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def expert_bytes(self) -> int:
        return expert_bytes(self.hidden_size, self.moe_intermediate_size, self.dtype_bytes)

    @property
    def dense_bytes(self) -> int:
        """Embedding and output head, attention, norms and routers."""
        queries = self.num_attention_heads * self.head_dim
        keys_and_values = 2 * self.num_kv_heads * self.head_dim
        projections = (2 * queries + keys_and_values) * self.hidden_size
        norms = 2 * self.hidden_size + 2 * self.head_dim
        layer = projections + norms + self.num_experts * self.hidden_size
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return (embeddings + self.num_layers * layer + self.hidden_size) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.kv_dtype_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rollout rank holds."""

    num_expert_slots: int
    """Of every layer."""
    expert_bytes: int
    dense_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.expert_bytes + self.dense_bytes + self.kv_bytes


def rank_memory(model: ModelSizes, *, num_expert_slots: int, kv_tokens: int) -> RankMemory:
    return RankMemory(
        num_expert_slots=num_expert_slots,
        expert_bytes=num_expert_slots * model.num_layers * model.expert_bytes,
        dense_bytes=model.dense_bytes,
        kv_bytes=kv_tokens * model.kv_bytes_per_token,
    )


def max_experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """Expert slots that each rank needs when so many serve: the experts dealt as evenly as possible."""
    if num_experts < 1 or num_ranks < 1:
        raise ValueError(f"num_experts={num_experts}, num_ranks={num_ranks}: both must be at least 1")
    return -(-num_experts // num_ranks)


def expert_bytes(hidden_size: int, moe_intermediate_size: int, dtype_bytes: int) -> int:
    """Gate, up and down projection of one expert in one layer."""
    return 3 * hidden_size * moe_intermediate_size * dtype_bytes


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype_bytes: int) -> int:
    return 2 * num_layers * num_kv_heads * head_dim * kv_dtype_bytes


def format_bytes(num_bytes: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if abs(num_bytes) >= size / 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1024:.2f} KiB"


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of several spellings that the file has."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value >= 1:
            return value
        if value is not None:
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
    raise ValueError(f"{names[0]} is missing")
