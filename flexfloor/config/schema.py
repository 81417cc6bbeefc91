"""The schema of every Hydra group.

Rules that need one group only stand in its `__post_init__`; rules across groups in `rules`; rules that look
at files and installed packages in `machine`.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from flexfloor.config.addresses import check_attachments, check_server_url, check_trainer_endpoint
from flexfloor.config.checks import MAX_SEED as MAX_SEED
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
from flexfloor.config.model import ModelConfig as ModelConfig
from flexfloor.config.model import TinyModelConfig as TinyModelConfig
from flexfloor.config.release import ReleaseConfig as ReleaseConfig
from flexfloor.config.scheduling import SchedulingConfig as SchedulingConfig
from flexfloor.config.server_args import check_server_args

PARK_FREES = ("experts", "kv", "dense")


@dataclass(kw_only=True)
class ClusterConfig:
    """Machines, and who runs where."""

    name: str = MISSING
    """Of the machines; with h100, h200 or h20 in it, it also names the clock of `scheduling.clock=auto`."""
    device: Device = MISSING
    """What ranks compute on."""
    num_nodes: int = 1
    """A run starts processes on one node only; on more it attaches to a server and a trainer."""
    num_devices_per_node: int = MISSING
    """GPUs of a node; on CPU the number of rank processes that may share the host."""
    device_memory_bytes: int = MISSING
    """Memory of one device that weights, KV cache and workspace share."""
    server_url: str | None = None
    """Attach to a running flexfloor-serve at this URL instead of starting one."""
    trainer_endpoint: str | None = None
    """Attach to a running trainer at this ZeroMQ endpoint instead of starting one."""
    trainer_keys: str | None = None
    """File with the keys of a trainer at a tcp endpoint, as flexfloor-prepare writes it."""
    iteration_log: str | None = None
    """--flexfloor-iteration-log of the server that the run attaches to, on a file system that it shares."""
    server_start_timeout_s: float = 600.0
    """Longest wait for the server to be ready."""
    trainer_start_timeout_s: float = 600.0
    """Longest wait for the trainer to be ready."""
    max_server_restarts: int = 2
    """A server that this run started and that ends is started anew, so often without a whole step between."""

    def __post_init__(self) -> None:
        complete(self, "cluster")
        at_least(self, "cluster", 1, "num_nodes", "num_devices_per_node", "device_memory_bytes")
        at_least(self, "cluster", 0, "max_server_restarts")
        positive(self, "cluster", "server_start_timeout_s", "trainer_start_timeout_s")
        check_server_url(self.server_url)
        check_trainer_endpoint(self.trainer_endpoint)
        check_attachments(self)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.num_devices_per_node


@dataclass(kw_only=True)
class RolloutConfig:
    """The EP group, and what one rollout step draws from it."""

    ep_size: int = MISSING
    """Ranks of the rollout's EP group; attention data parallelism has the same width."""
    num_prompt_groups: int = MISSING
    """Prompts of one rollout step."""
    num_responses_per_prompt: int = MISSING
    """Size of a prompt group; at least 2, for advantages compare its responses."""
    max_prompt_tokens: int = MISSING
    """A longer prompt is refused before the first step."""
    max_response_tokens: int = MISSING
    """A response that reaches it is cut off and counts as truncated."""
    temperature: float = 1.0
    """1.0 only: the trainer's logprobs are those of temperature 1."""
    top_p: float = 1.0
    """1.0 only: with a cut the engine's logprobs would not be those of what was sampled."""
    max_running_requests: int = 256
    """Running responses of the whole EP group; the engine divides it by the ranks."""
    kv_cache_tokens: int | None = None
    """KV tokens of one rank; null lets the engine size its pool."""
    collectives: Collectives = MISSING
    """What carries the EP group's collectives."""
    stream_interval_tokens: int = 16
    """A running response reports to the ledger every so many tokens."""
    response_timeout_s: float = 600.0
    """Longest silence of one response before it is tried again."""
    max_attempts: int = 3
    """A response that was lost so many times ends the run; each attempt goes on where the last one ended."""
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
    """Whether ranks may leave the EP group during a rollout, and how far down."""

    mode: MembershipMode = MISSING
    """Whether ranks may leave the EP group during a rollout."""
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
    recovery: bool = True
    """Whether the other ranks go on when one is lost (`elastic` only, where the server can)."""
    heartbeat_timeout_s: float = 60.0
    """A rank that is silent for so long is ended, and is lost."""

    def __post_init__(self) -> None:
        complete(self, "membership")
        at_least(self, "membership", 1, "floor")
        positive(self, "membership", "operation_timeout_s", "heartbeat_timeout_s")
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
    """From rewards to a loss."""

    advantage_norm: AdvantageNorm = AdvantageNorm.group_std
    """How rewards of a prompt group become advantages."""
    loss_agg: LossAgg = LossAgg.sequence_mean
    """How tokens are averaged."""
    clip_low: float = 0.2
    """The ratio of new to old probability is clipped below at 1 - clip_low ..."""
    clip_high: float = 0.28
    """... and above at 1 + clip_high."""
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
    """Megatron-Core: ranks, parallel sizes, optimizer, and the way of new weights to the server."""

    num_ranks: int = MISSING
    """Processes of the trainer, one a device."""
    tp_size: int = 1
    """Tensor parallelism of everything but the experts."""
    pp_size: int = 1
    """Pipeline stages; they divide the layers."""
    ep_size: int = 1
    """Ranks that the experts are dealt to."""
    expert_tp_size: int = 1
    """Tensor parallelism inside an expert; on a CPU equal to `trainer.tp_size`."""
    micro_batch_tokens: int = MISSING
    """Responses are packed into microbatches of at most so many tokens (one response may exceed it)."""
    learning_rate: float = MISSING
    """Of Adam, the same in every step; 0 is the control run of a learning curve."""
    weight_decay: float = 0.0
    """Of Adam."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.98
    """Decay of the mean of their squares."""
    max_grad_norm: float = 1.0
    """Larger gradients are scaled down to it."""
    distributed_optimizer: bool = True
    """Deal Adam's state to the data-parallel ranks."""
    optimizer_offload: bool = False
    """Keep fp32 weights and optimizer state in host memory: slower, 12 bytes a parameter less on devices."""
    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    weight_sync: WeightSyncPath = WeightSyncPath.distributed
    """How new weights reach the server."""
    weight_bucket_bytes: int = 512 * 1024 * 1024
    """Weights are sent in buckets of about so many bytes."""
    checkpoint_every_steps: int = 0
    """Checkpoint every so many steps. 0 saves none, and a resume trains the recorded steps again."""
    checkpoint_keep: int = 2
    """So many checkpoints are kept, the newest ones."""
    step_timeout_s: float = 1800.0
    """Longest wait for one command to the trainer: a train step, a weight sync, a save."""

    def __post_init__(self) -> None:
        complete(self, "trainer")
        at_least(self, "trainer", 1, "num_ranks", "tp_size", "pp_size", "ep_size", "expert_tp_size")
        at_least(self, "trainer", 1, "micro_batch_tokens", "weight_bucket_bytes", "checkpoint_keep")
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
    """Prompts, and the function that scores their responses."""

    source: DataSource = MISSING
    """Where prompts come from."""
    path: str | None = None
    """File or folder of `jsonl`, `parquet` and `hf_disk`."""
    task: str | None = None
    """reasoning_gym task name."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """For the reasoning_gym task, added one by one: `+data.task_options.NAME=VALUE`."""
    num_prompts: int | None = None
    """Size of a generated dataset, or a cap on a loaded one."""
    seed: int = 0
    """Of a generated dataset."""
    prompt_field: str = "prompt"
    """Name of the field with the prompt's text."""
    messages_field: str = "messages"
    """Name of the field with chat messages, where there is no text."""
    answer_field: str = "answer"
    """Name of the field with the answer."""
    id_field: str = "id"
    """Name of the field with the prompt's id; without one it is a hash of the record."""
    drop_last: bool = False
    """Leave out the partial last batch of a pass."""
    reward: str = MISSING
    """exact | regex | math_verify | reasoning_gym | arithmetic | module:function"""
    reward_options: dict[str, Any] = field(default_factory=dict)
    """For the reward function, added one by one: `+data.reward_options.NAME=VALUE`."""
    reward_workers: int = 2
    """Processes that compute rewards."""
    reward_timeout_s: float = 30.0
    """Longest time of one call."""
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
    """Where figures go besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Write `tensorboard/` in the run directory."""
    wandb_project: str | None = None
    """W&B project; null logs nothing there."""
    progress: bool = True
    """Show a line a step on the terminal."""


@dataclass(kw_only=True)
class TrainConfig:
    """A whole run."""

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
    """Of sampling, of the order of prompts and of the trainer."""
    num_steps: int = MISSING
    """Rollout steps, each with its train step and weight sync."""
    run_dir: str = MISSING
    """Everything that a run leaves behind; Hydra's own output folder by default."""
    save_hf: bool = True
    """Write the final weights as a Hugging Face checkpoint."""
    resume: str | None = None
    """Go on with the run in this folder, under its own configuration."""

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
