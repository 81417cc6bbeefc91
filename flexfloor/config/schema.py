"""The schema of every Hydra group. Enum members are lower case: OmegaConf matches the member's name."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class ModelSource(StrEnum):
    hf = "hf"
    """A Hugging Face checkpoint folder on disk."""
    tiny = "tiny"
    """A tiny Qwen3-MoE that is created and warmed up by this run, then cached."""


class Collectives(StrEnum):
    gloo = "gloo"
    shm = "shm"
    """Shared memory within one host; CPU only."""
    nccl = "nccl"


class MembershipMode(StrEnum):
    static = "static"


class Placement(StrEnum):
    round_robin = "round_robin"
    """verl's baseline inside one EP group: arrival order over the ranks, whatever the lengths."""
    least_inflight = "least_inflight"


class DataSource(StrEnum):
    jsonl = "jsonl"
    parquet = "parquet"
    hf_disk = "hf_disk"
    reasoning_gym = "reasoning_gym"
    arithmetic = "arithmetic"


class LossAgg(StrEnum):
    sequence_mean = "sequence_mean"
    """Mean over tokens inside each response, then mean over responses."""
    fixed = "fixed"
    """Sum over tokens divided by (number of responses x `rollout.max_response_tokens`)."""
    token_mean = "token_mean"
    """Mean over all tokens of the step: long responses dominate."""


class AdvantageNorm(StrEnum):
    group_std = "group_std"
    """(reward - group mean) / (group standard deviation + 1e-6)."""
    group_mean = "group_mean"
    """reward - group mean."""


class WeightSyncPath(StrEnum):
    distributed = "distributed"
    """Broadcast flattened buckets from trainer rank 0 over a process group shared with every engine rank."""
    tensor = "tensor"
    """Flattened buckets handed over by shared memory (CPU) or CUDA IPC: trainer and engine share a host."""
    disk = "disk"
    """A Hugging Face checkpoint in the run directory that the engine reloads."""


@dataclass(kw_only=True)
class ClusterConfig:
    """Machines, and who runs where."""

    name: str = MISSING
    device: Device = MISSING
    num_nodes: int = 1
    num_devices_per_node: int = MISSING
    """GPUs of a node; on CPU the number of rank processes that may share the host."""
    device_memory_bytes: int = MISSING
    """Memory of one device that weights, KV cache and workspace share."""
    server_url: str | None = None
    """Attach to a running flexfloor-serve at this URL instead of starting one."""
    trainer_endpoint: str | None = None
    """Attach to a running trainer at this ZeroMQ endpoint instead of starting one."""
    server_start_timeout_s: float = 600.0
    trainer_start_timeout_s: float = 600.0


@dataclass(kw_only=True)
class TinyModelConfig:
    """Shape and warm-up of a tiny Qwen3-MoE (`model.source=tiny`)."""

    num_layers: int = 3
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    top_k: int = 2
    moe_intermediate_size: int = 128
    init_seed: int = 0
    warmup_steps: int = 500
    """Supervised steps on demonstrations before RL starts; 0 keeps the random weights."""
    warmup_batch_size: int = 64
    warmup_learning_rate: float = 2e-3
    warmup_corrupt_share: float = 0.08
    """Share of demonstration steps that are wrong on purpose: what RL then has to unlearn."""


@dataclass(kw_only=True)
class ModelConfig:
    name: str = MISSING
    source: ModelSource = MISSING
    path: str | None = None
    """Checkpoint folder (`source=hf`), or the cache folder of prepared tiny models (`source=tiny`)."""
    dtype: Dtype = MISSING
    num_layers: int = MISSING
    num_experts: int = MISSING
    num_active_experts: int = MISSING
    expert_bytes: int = MISSING
    """Bytes of one logical expert in one layer."""
    dense_bytes: int = MISSING
    """Bytes of everything that every rank holds whole: attention, norms, router, embeddings, head."""
    kv_bytes_per_token: int = MISSING
    context_tokens: int = MISSING
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclass(kw_only=True)
class RolloutConfig:
    ep_size: int = MISSING
    """Ranks of the rollout's EP group; attention data parallelism has the same width."""
    num_prompt_groups: int = MISSING
    """Prompts of one rollout step."""
    num_responses_per_prompt: int = MISSING
    max_prompt_tokens: int = MISSING
    max_response_tokens: int = MISSING
    temperature: float = 1.0
    top_p: float = 1.0
    max_running_requests: int = 256
    """Running responses of the whole EP group; the engine divides it by the ranks."""
    kv_cache_tokens: int | None = None
    """KV tokens of one rank; null lets the engine size its pool."""
    collectives: Collectives = MISSING
    stream_interval_tokens: int = 16
    """A running response reports to the ledger every so many tokens."""
    response_timeout_s: float = 600.0
    """Longest silence of one response before it is tried again."""
    max_attempts: int = 3
    deterministic: bool = True
    """Per-response sampling seeds: what is drawn does not depend on placement."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Extra SGLang flags, e.g. {chunked-prefill-size: 4096}."""


@dataclass(kw_only=True)
class MembershipConfig:
    mode: MembershipMode = MISSING


@dataclass(kw_only=True)
class SchedulingConfig:
    placement: Placement = MISSING


@dataclass(kw_only=True)
class AlgorithmConfig:
    advantage_norm: AdvantageNorm = AdvantageNorm.group_std
    loss_agg: LossAgg = LossAgg.sequence_mean
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference model (the weights at the start); 0 keeps no reference."""
    importance_cap: float | None = 2.0
    """Truncated importance sampling between rollout and trainer logprobs; null switches it off."""
    num_minibatches: int = 1
    """Optimizer steps per rollout step."""


@dataclass(kw_only=True)
class TrainerConfig:
    num_ranks: int = MISSING
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    expert_tp_size: int = 1
    micro_batch_tokens: int = MISSING
    """Responses are packed into microbatches of at most so many tokens (one response may exceed it)."""
    learning_rate: float = MISSING
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    max_grad_norm: float = 1.0
    distributed_optimizer: bool = True
    recompute: bool = False
    weight_sync: WeightSyncPath = WeightSyncPath.distributed
    weight_bucket_bytes: int = 512 * 1024 * 1024
    checkpoint_every_steps: int = 0
    """Distributed checkpoint every so many steps; 0 saves only the final Hugging Face checkpoint."""
    step_timeout_s: float = 1800.0


@dataclass(kw_only=True)
class DataConfig:
    source: DataSource = MISSING
    path: str | None = None
    task: str | None = None
    """reasoning_gym task name."""
    task_options: dict[str, Any] = field(default_factory=dict)
    num_prompts: int | None = None
    """Size of a generated dataset, or a cap on a loaded one."""
    seed: int = 0
    prompt_field: str = "prompt"
    messages_field: str = "messages"
    answer_field: str = "answer"
    id_field: str = "id"
    drop_last: bool = False
    """Leave out the partial last batch of a pass."""
    reward: str = MISSING
    """exact | regex | math_verify | reasoning_gym | arithmetic | module:function"""
    reward_options: dict[str, Any] = field(default_factory=dict)
    reward_workers: int = 2
    reward_timeout_s: float = 30.0
    reward_on_error: float | None = None
    """Reward given when the function fails; null ends the run with the sample's error."""


@dataclass(kw_only=True)
class LoggingConfig:
    tensorboard: bool = True
    wandb_project: str | None = None
    """W&B project; null logs nothing there."""
    progress: bool = True


@dataclass(kw_only=True)
class TrainConfig:
    cluster: ClusterConfig = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    rollout: RolloutConfig = MISSING
    membership: MembershipConfig = MISSING
    scheduling: SchedulingConfig = MISSING
    algorithm: AlgorithmConfig = MISSING
    trainer: TrainerConfig = MISSING
    logging: LoggingConfig = MISSING
    seed: int = 0
    num_steps: int = MISSING
    run_dir: str = MISSING
    """Everything that a run leaves behind; Hydra's own output folder by default."""
    save_hf: bool = True
    """Write the final weights as a Hugging Face checkpoint."""
