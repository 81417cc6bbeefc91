"""The schema of every Hydra group.

Rules that need one group only stand in its `__post_init__`; rules across groups in `rules`; rules that look
at files and installed packages in `machine`.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from flexfloor.config.addresses import check_server_url, check_trainer_endpoint
from flexfloor.config.checks import at_least, complete, positive, require, within
from flexfloor.config.choices import AdvantageNorm as AdvantageNorm
from flexfloor.config.choices import Collectives as Collectives
from flexfloor.config.choices import DataSource as DataSource
from flexfloor.config.choices import Device as Device
from flexfloor.config.choices import Dtype as Dtype
from flexfloor.config.choices import ExpertSlots as ExpertSlots
from flexfloor.config.choices import LossAgg as LossAgg
from flexfloor.config.choices import MembershipMode as MembershipMode
from flexfloor.config.choices import ModelSource as ModelSource
from flexfloor.config.choices import Placement as Placement
from flexfloor.config.choices import WeightSyncPath as WeightSyncPath
from flexfloor.config.data_rules import check_reward, check_source
from flexfloor.config.release import ReleaseConfig as ReleaseConfig
from flexfloor.config.scheduling import SchedulingConfig as SchedulingConfig
from flexfloor.config.server_args import check_server_args

MAX_SEED = 2**31
"""Exclusive: sampling seeds have 31 bits."""
PARK_FREES = ("experts", "kv", "dense")


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

    def __post_init__(self) -> None:
        complete(self, "cluster")
        at_least(self, "cluster", 1, "num_nodes", "num_devices_per_node", "device_memory_bytes")
        positive(self, "cluster", "server_start_timeout_s", "trainer_start_timeout_s")
        check_server_url(self.server_url)
        check_trainer_endpoint(self.trainer_endpoint)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.num_devices_per_node


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
    """Extra SGLang flags, e.g. `+rollout.server_args.chunked-prefill-size=4096`."""

    def __post_init__(self) -> None:
        complete(self, "rollout")
        at_least(
            self, "rollout", 1, "ep_size", "num_prompt_groups", "max_prompt_tokens", "max_response_tokens"
        )
        at_least(self, "rollout", 1, "max_running_requests", "kv_cache_tokens", "stream_interval_tokens")
        at_least(self, "rollout", 1, "num_responses_per_prompt", "max_attempts")
        positive(self, "rollout", "temperature", "response_timeout_s")
        require(
            self.temperature == 1.0,
            "rollout.temperature",
            self.temperature,
            "the trainer computes its logprobs at temperature 1, so others could not be compared",
            "set rollout.temperature=1.0",
        )
        # The engine's logprobs are those before the top-p cut, so they would not be those of what was
        # sampled, and importance sampling cannot repair what the cut made impossible.
        require(
            self.top_p == 1.0,
            "rollout.top_p",
            self.top_p,
            "only 1.0 keeps the recorded logprobs those of the sampling distribution",
            "set rollout.top_p=1.0",
        )
        require(
            self.max_running_requests >= self.ep_size,
            "rollout.max_running_requests",
            self.max_running_requests,
            f"the engine divides it by rollout.ep_size={self.ep_size}, so some rank would run nothing",
            f"set rollout.max_running_requests to {self.ep_size} or more",
        )
        check_server_args(self.server_args)

    @property
    def num_responses(self) -> int:
        """Responses of one rollout step."""
        return self.num_prompt_groups * self.num_responses_per_prompt

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_tokens + self.max_response_tokens


@dataclass(kw_only=True)
class MembershipConfig:
    mode: MembershipMode = MISSING
    floor: int = 1
    """Fewest ranks that may serve (`elastic` only)."""
    operation_timeout_s: float = 120.0
    """Longest wait for a release or a rejoin; a change that is not prepared by then is cancelled."""
    folder: str | None = None
    """--flexfloor-folder of the server that the run attaches to; null when the run starts the server."""
    expert_slots: ExpertSlots | None = None
    """null: `reserved` on GPUs, whose graphs need fixed addresses, `exact` on CPUs."""
    park_frees: list[str] = field(default_factory=lambda: ["experts", "kv"])
    """What a parked rank gives back: of experts, kv, dense."""
    member_sets: list[list[int]] = field(default_factory=list)
    """Sets of ranks, besides all, that the server prepares at its start: communicators, and CUDA graphs."""

    def __post_init__(self) -> None:
        complete(self, "membership")
        at_least(self, "membership", 1, "floor")
        positive(self, "membership", "operation_timeout_s")
        unknown = sorted(set(self.park_frees) - set(PARK_FREES))
        require(
            not unknown,
            "membership.park_frees",
            self.park_frees,
            f"unknown: {', '.join(unknown)}",
            f"take from {', '.join(PARK_FREES)}",
        )


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

    def __post_init__(self) -> None:
        within(self, "algorithm", 0, 1, "clip_low")
        at_least(self, "algorithm", 0, "clip_high", "kl_coef")
        at_least(self, "algorithm", 1, "importance_cap", "num_minibatches")


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
    optimizer_offload: bool = False
    """Keep fp32 weights and optimizer state in host memory: slower, 12 bytes a parameter less on devices."""
    recompute: bool = False
    weight_sync: WeightSyncPath = WeightSyncPath.distributed
    weight_bucket_bytes: int = 512 * 1024 * 1024
    checkpoint_every_steps: int = 0
    """Distributed checkpoint every so many steps; 0 saves only the final Hugging Face checkpoint."""
    step_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        complete(self, "trainer")
        at_least(self, "trainer", 1, "num_ranks", "tp_size", "pp_size", "ep_size", "expert_tp_size")
        at_least(self, "trainer", 1, "micro_batch_tokens", "weight_bucket_bytes")
        at_least(self, "trainer", 0, "learning_rate", "weight_decay", "checkpoint_every_steps")
        within(self, "trainer", 0, 1, "adam_beta1", "adam_beta2")
        positive(self, "trainer", "max_grad_norm", "step_timeout_s")
        self._check_widths("tp_size", self.tp_size)
        self._check_widths("ep_size * trainer.expert_tp_size", self.ep_size * self.expert_tp_size)

    def _check_widths(self, name: str, width: int) -> None:
        need = width * self.pp_size
        require(
            self.num_ranks % need == 0,
            "trainer.num_ranks",
            self.num_ranks,
            f"is not a multiple of trainer.{name} * trainer.pp_size = {need}",
            f"set trainer.num_ranks to a multiple of {need}, or make the parallel sizes smaller",
        )

    @property
    def dp_size(self) -> int:
        """Data-parallel width of everything but the experts."""
        return self.num_ranks // (self.tp_size * self.pp_size)

    @property
    def expert_dp_size(self) -> int:
        return self.num_ranks // (self.ep_size * self.expert_tp_size * self.pp_size)


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

    def __post_init__(self) -> None:
        complete(self, "data")
        at_least(self, "data", 1, "num_prompts", "reward_workers")
        within(self, "data", 0, MAX_SEED, "seed")
        positive(self, "data", "reward_timeout_s")
        check_source(self)
        check_reward(self)

    @property
    def is_generated(self) -> bool:
        return self.source in (DataSource.arithmetic, DataSource.reasoning_gym)


@dataclass(kw_only=True)
class LoggingConfig:
    tensorboard: bool = True
    wandb_project: str | None = None
    """W&B project; null logs nothing there."""
    progress: bool = True
    """Show a line a step on the terminal."""


@dataclass(kw_only=True)
class TrainConfig:
    cluster: ClusterConfig = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    rollout: RolloutConfig = MISSING
    membership: MembershipConfig = MISSING
    release: ReleaseConfig = MISSING
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

    def __post_init__(self) -> None:
        complete(self, "")
        require(0 <= self.seed < MAX_SEED, "seed", self.seed, "must fit in 31 bits", "set seed=0 or another")
        require(
            self.num_steps >= 1,
            "num_steps",
            self.num_steps,
            "a run has at least 1 step",
            "set num_steps=1 or more",
        )
        require(
            bool(self.run_dir),
            "run_dir",
            self.run_dir,
            "names no folder",
            "leave run_dir out, or name a folder",
        )
