"""The `model` group: a checkpoint, and the sizes that plans of memory rest on."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from flexfloor.config.checks import MAX_SEED, at_least, complete, require, within
from flexfloor.config.choices import Dtype, ModelSource


@dataclass(kw_only=True)
class TinyModelConfig:
    """Shape and warm-up of a tiny Qwen3-MoE (`model.source=tiny`)."""

    num_layers: int = 3
    """As `model.num_layers`."""
    hidden_size: int = 128
    """Width of the model."""
    num_heads: int = 4
    """Attention heads; a multiple of `model.tiny.num_kv_heads`."""
    num_kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 32
    """Width of a head."""
    num_experts: int = 8
    """As `model.num_experts`."""
    top_k: int = 2
    """As `model.num_active_experts`."""
    moe_intermediate_size: int = 128
    """Inner width of an expert."""
    init_seed: int = 0
    """Of the random weights and of the demonstrations."""
    warmup_steps: int = 500
    """Supervised steps on demonstrations before RL starts; 0 keeps the random weights."""
    warmup_batch_size: int = 64
    """Demonstrations of one supervised step."""
    warmup_learning_rate: float = 2e-3
    """Highest of the warm-up; it decays along a cosine."""
    warmup_corrupt_share: float = 0.08
    """Share of demonstration steps that are wrong on purpose: what RL then has to unlearn."""

    def __post_init__(self) -> None:
        group = "model.tiny"
        at_least(self, group, 1, "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
        at_least(self, group, 1, "num_experts", "top_k", "moe_intermediate_size", "warmup_batch_size")
        at_least(self, group, 0, "warmup_steps", "warmup_learning_rate")
        within(self, group, 0, MAX_SEED, "init_seed")
        within(self, group, 0, 1, "warmup_corrupt_share")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"{group}.num_kv_heads",
            self.num_kv_heads,
            f"does not divide {group}.num_heads={self.num_heads}",
            f"set {group}.num_kv_heads to a divisor of {self.num_heads}",
        )


@dataclass(kw_only=True)
class ModelConfig:
    """A checkpoint, and its sizes: memory is planned with them, and a checkpoint that differs is refused."""

    name: str = MISSING
    """Shown in plans and reports."""
    source: ModelSource = MISSING
    """Where the weights come from."""
    path: str | None = None
    """Checkpoint folder (`source=hf`), or the cache folder of prepared tiny models (`source=tiny`)."""
    dtype: Dtype = MISSING
    """Of weights, activations and KV cache, in rollout and training."""
    num_layers: int = MISSING
    """All of them have experts."""
    num_experts: int = MISSING
    """Routed experts of a layer."""
    num_active_experts: int = MISSING
    """Experts that a token is routed to."""
    expert_bytes: int = MISSING
    """Bytes of one logical expert in one layer."""
    dense_bytes: int = MISSING
    """Bytes of everything that every rank holds whole: attention, norms, router, embeddings, head."""
    kv_bytes_per_token: int = MISSING
    """KV cache of one token over all layers."""
    context_tokens: int = MISSING
    """Longest prompt with its response."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)

    def __post_init__(self) -> None:
        complete(self, "model")
        at_least(self, "model", 1, "num_layers", "num_experts", "num_active_experts", "expert_bytes")
        at_least(self, "model", 1, "dense_bytes", "kv_bytes_per_token", "context_tokens")
        require(
            self.num_active_experts <= self.num_experts,
            "model.num_active_experts",
            self.num_active_experts,
            f"a token cannot be routed to more experts than model.num_experts={self.num_experts}",
            f"set model.num_active_experts to at most {self.num_experts}",
        )
        is_hf = self.source is ModelSource.hf
        require(
            bool(self.path),
            "model.path",
            self.path,
            "no checkpoint is named" if is_hf else "no cache folder is named",
            f"set model.path to {'a Hugging Face checkpoint' if is_hf else 'a folder, e.g. runs/models'}",
        )
