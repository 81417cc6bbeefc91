"""Rules across groups. Each refuses with the key to change, its value, and what would work."""

from flexfloor.config.addresses import host_of
from flexfloor.config.checks import divides, require
from flexfloor.config.logprob_rules import check_logprobs
from flexfloor.config.machine import check_machine
from flexfloor.config.membership_rules import check_membership, check_release
from flexfloor.config.memory import USABLE_SHARE, rollout_memory, shares_devices, trainer_bytes
from flexfloor.config.scheduling_rules import check_scheduling
from flexfloor.config.schema import (
    Collectives,
    DataSource,
    Device,
    MembershipMode,
    ModelSource,
    TrainConfig,
    WeightSyncPath,
)
from flexfloor.model_memory import expert_bytes, kv_bytes_per_token

_GIB = 1024**3


def validate(config: TrainConfig, *, check_files: bool = True) -> None:
    """Refuse a configuration that cannot work.

    Without `check_files` nothing outside the configuration is looked at: no file, package or device.
    """
    for rule in (
        _check_rollout_experts,
        _check_rollout_devices,
        _check_trainer_experts,
        _check_trainer_devices,
        _check_pipeline,
        _check_lengths,
        _check_kv_cache,
        _check_responses_per_prompt,
        _check_minibatches,
        _check_dropped_batch,
        _check_collectives,
        check_membership,
        check_release,
        check_logprobs,
        check_scheduling,
        _check_weight_sync,
        _check_offload,
        _check_tiny_model,
        _check_rollout_memory,
        _check_trainer_memory,
    ):
        rule(config)
    if check_files:
        check_machine(config)


def _check_rollout_experts(config: TrainConfig) -> None:
    why = "a static EP group needs the same number of experts on every rank"
    divides("rollout.ep_size", config.rollout.ep_size, "model.num_experts", config.model.num_experts, why)


def _check_rollout_devices(config: TrainConfig) -> None:
    need, cluster = config.rollout.ep_size, config.cluster
    _check_device_count("rollout.ep_size", need, config)
    starts_here = cluster.server_url is None
    fits = need <= cluster.num_devices_per_node
    fix = "start flexfloor-serve on the nodes and set cluster.server_url"
    problem = (
        f"one node has {cluster.num_devices_per_node} devices, and this run starts processes on one node only"
    )
    require(fits or not starts_here, "rollout.ep_size", need, problem, fix)


def _check_trainer_experts(config: TrainConfig) -> None:
    why = "every trainer rank holds the same number of experts"
    divides("trainer.ep_size", config.trainer.ep_size, "model.num_experts", config.model.num_experts, why)


def _check_trainer_devices(config: TrainConfig) -> None:
    need, cluster = config.trainer.num_ranks, config.cluster
    _check_device_count("trainer.num_ranks", need, config)
    starts_here = cluster.trainer_endpoint is None
    fits = need <= cluster.num_devices_per_node
    fix = "start the trainer on the nodes and set cluster.trainer_endpoint"
    problem = (
        f"one node has {cluster.num_devices_per_node} devices, and this run starts processes on one node only"
    )
    require(fits or not starts_here, "trainer.num_ranks", need, problem, fix)


def _check_device_count(key: str, need: int, config: TrainConfig) -> None:
    cluster = config.cluster
    have = cluster.num_devices
    need_names = f"cluster.num_nodes={cluster.num_nodes} x cluster.num_devices_per_node"
    problem = f"more ranks than the {have} devices of {need_names}={cluster.num_devices_per_node}"
    require(need <= have, key, need, problem, f"set {key} to at most {have}, or choose a larger cluster")
    total = config.rollout.ep_size + config.trainer.num_ranks
    on_gpu = cluster.device is Device.cuda
    problem = f"rollout.ep_size + trainer.num_ranks = {total} processes on a host that may run {have}"
    fix = f"lower {key}, or set cluster.num_devices_per_node={total}"
    require(on_gpu or total <= have, key, need, problem, fix)


def _check_pipeline(config: TrainConfig) -> None:
    why = "pipeline stages hold the same number of layers"
    divides("trainer.pp_size", config.trainer.pp_size, "model.num_layers", config.model.num_layers, why)


def _check_lengths(config: TrainConfig) -> None:
    rollout, context = config.rollout, config.model.context_tokens
    need = rollout.max_sequence_tokens
    room = context - rollout.max_prompt_tokens
    problem = (
        f"with rollout.max_prompt_tokens={rollout.max_prompt_tokens} it needs a context of {need} tokens, "
    )
    problem += f"and model.context_tokens={context}"
    fix = (
        f"set rollout.max_response_tokens to at most {room}"
        if room > 0
        else "shorten rollout.max_prompt_tokens"
    )
    require(need <= context, "rollout.max_response_tokens", rollout.max_response_tokens, problem, fix)


def _check_kv_cache(config: TrainConfig) -> None:
    rollout = config.rollout
    need, have = rollout.max_sequence_tokens, rollout.kv_cache_tokens
    sizes = f"{rollout.max_prompt_tokens} prompt + {rollout.max_response_tokens} response tokens"
    problem = f"one longest sequence ({sizes}) does not fit the KV cache of a rank"
    fix = f"set rollout.kv_cache_tokens to {need} or more, or null"
    require(have is None or have >= need, "rollout.kv_cache_tokens", have, problem, fix)


def _check_responses_per_prompt(config: TrainConfig) -> None:
    count = config.rollout.num_responses_per_prompt
    problem = f"algorithm.advantage_norm={config.algorithm.advantage_norm} of a group of one is always 0: "
    problem += "nothing would be learnt"
    fix = "set rollout.num_responses_per_prompt to 2 or more"
    require(count >= 2, "rollout.num_responses_per_prompt", count, problem, fix)


def _check_minibatches(config: TrainConfig) -> None:
    num_responses, count = config.rollout.num_responses, config.algorithm.num_minibatches
    name = "rollout.num_prompt_groups * rollout.num_responses_per_prompt"
    divides("algorithm.num_minibatches", count, name, num_responses, "minibatches have the same size")
    dp_size = config.trainer.dp_size
    problem = f"a minibatch of {num_responses // count} responses leaves some of the {dp_size} data-parallel "
    problem += "trainer ranks without any"
    most = max(1, num_responses // dp_size)
    fix = f"set algorithm.num_minibatches to at most {most}, or enlarge the rollout step"
    require(num_responses // count >= dp_size, "algorithm.num_minibatches", count, problem, fix)


def _check_dropped_batch(config: TrainConfig) -> None:
    data, need = config.data, config.rollout.num_prompt_groups
    is_empty = data.drop_last and data.num_prompts is not None and data.num_prompts < need
    problem = (
        f"a step needs rollout.num_prompt_groups={need}, and data.drop_last leaves out the partial batch: "
    )
    problem += "no batch is left"
    fix = f"set data.num_prompts to {need} or more, or data.drop_last=false"
    require(not is_empty, "data.num_prompts", data.num_prompts, problem, fix)


def _check_collectives(config: TrainConfig) -> None:
    chosen, cluster = config.rollout.collectives, config.cluster
    on_gpu = cluster.device is Device.cuda
    key, fix = "rollout.collectives", f"set rollout.collectives={'nccl' if on_gpu else 'gloo'}"
    problem = f"does not work on cluster.device={cluster.device}"
    require((chosen is Collectives.nccl) == on_gpu, key, chosen.value, problem, fix)
    is_split = chosen is Collectives.shm and cluster.num_nodes > 1
    problem = f"shared memory ends at the host, and cluster.num_nodes={cluster.num_nodes}"
    require(not is_split, key, chosen.value, problem, "set rollout.collectives=gloo")


def _check_weight_sync(config: TrainConfig) -> None:
    cluster = config.cluster
    is_tensor = config.trainer.weight_sync is WeightSyncPath.tensor
    key, fix = "trainer.weight_sync", "set trainer.weight_sync=distributed"
    problem = f"hands weights over inside one host, and cluster.num_nodes={cluster.num_nodes}"
    require(not is_tensor or cluster.num_nodes == 1, key, "tensor", problem, fix)
    server, trainer = host_of(cluster.server_url), host_of(cluster.trainer_endpoint)
    problem = f"hands weights over inside one host, and the server is on {server}, the trainer on {trainer}"
    require(not is_tensor or server == trainer, key, "tensor", problem, fix)


def _check_offload(config: TrainConfig) -> None:
    offloads, on_cpu = config.trainer.optimizer_offload, config.cluster.device is Device.cpu
    problem = "on cluster.device=cpu the optimizer state lies in host memory anyway"
    fix = "set trainer.optimizer_offload=false"
    require(not (offloads and on_cpu), "trainer.optimizer_offload", offloads, problem, fix)


def _check_tiny_model(config: TrainConfig) -> None:
    model, tiny = config.model, config.model.tiny
    if model.source is not ModelSource.tiny:
        return
    source = config.data.source
    problem = "the tokenizer of a tiny model knows the characters of data=arithmetic only"
    require(
        source is DataSource.arithmetic, "data.source", source.value, problem, "set data=arithmetic, or model"
    )
    item_bytes = model.dtype.num_bytes
    kv_bytes = kv_bytes_per_token(tiny.num_layers, tiny.num_kv_heads, tiny.head_dim, item_bytes)
    for name, follows in (
        ("num_layers", tiny.num_layers),
        ("num_experts", tiny.num_experts),
        ("num_active_experts", tiny.top_k),
        ("expert_bytes", expert_bytes(tiny.hidden_size, tiny.moe_intermediate_size, item_bytes)),
        ("kv_bytes_per_token", kv_bytes),
    ):
        stated = getattr(model, name)
        problem = f"model.tiny and model.dtype={model.dtype} make it {follows}"
        require(stated == follows, f"model.{name}", stated, problem, f"set model.{name}={follows}")


def _check_rollout_memory(config: TrainConfig) -> None:
    ep_size = config.rollout.ep_size
    relief = "lower rollout.kv_cache_tokens, or choose a larger cluster"
    relief += "; trainer.optimizer_offload=true frees most of the trainer" if shares_devices(config) else ""
    holds, problem = _rollout_fits(config, ep_size)
    require(holds, "rollout.ep_size", ep_size, problem, f"raise rollout.ep_size, {relief}")
    floor = config.membership.floor
    if config.membership.mode is MembershipMode.static or floor > ep_size:
        return
    holds, problem = _rollout_fits(config, floor)
    least = next(size for size in range(floor, ep_size + 1) if _rollout_fits(config, size)[0])
    fix = f"set membership.floor to {least} or more, {relief}"
    require(holds, "membership.floor", floor, f"with so few ranks {problem}", fix)


def _rollout_fits(config: TrainConfig, num_ranks: int) -> tuple[bool, str]:
    """Whether a rank fits its device when so many serve, and the numbers."""
    memory = rollout_memory(config.model, config.rollout, num_ranks)
    trainer = trainer_bytes(config) if shares_devices(config) else 0
    parts = f"{_gib(memory.expert_bytes)} for {memory.num_expert_slots} experts in every layer"
    parts += f" + {_gib(memory.dense_bytes)} dense weights + {_gib(memory.kv_bytes)} KV cache"
    parts += f" + {_gib(trainer)} of the trainer rank on the same device" if trainer else ""
    limit = _usable_bytes(config)
    problem = f"a rank needs {parts}, and {_gib(limit)} of cluster.device_memory_bytes may be used"
    return memory.total_bytes + trainer <= limit, problem


def _check_trainer_memory(config: TrainConfig) -> None:
    need, limit = trainer_bytes(config), _usable_bytes(config)
    problem = f"a trainer rank needs {_gib(need)} for weights, gradients and Adam, and {_gib(limit)} of "
    problem += "cluster.device_memory_bytes may be used"
    fix = "raise trainer.num_ranks with trainer.ep_size, or set trainer.optimizer_offload=true"
    require(need <= limit, "trainer.num_ranks", config.trainer.num_ranks, problem, fix)


def _usable_bytes(config: TrainConfig) -> int:
    return int(config.cluster.device_memory_bytes * USABLE_SHARE)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
