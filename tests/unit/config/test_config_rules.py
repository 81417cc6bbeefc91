"""Every rule: a small change to a working configuration that it must refuse, and the key that it names."""

import math

import pytest

from flexfloor.config.choices import Batching, LossAgg, ReleaseUse, StartingSize
from flexfloor.config.rules import validate
from flexfloor.config.schema import (
    AdvantageNorm,
    Collectives,
    DataSource,
    Device,
    Dtype,
    MembershipMode,
    ModelSource,
    WeightSyncPath,
)
from flexfloor.errors import ConfigError

CHECKPOINT = {"model.source": ModelSource.hf}
GPU = {"cluster.device": Device.cuda, "rollout.collectives": Collectives.nccl}
STATIC = {"membership.mode": MembershipMode.static}
TWO_NODES = {
    **STATIC,
    "cluster.num_nodes": 2,
    "cluster.server_url": "http://node1:30000",
    "cluster.trainer_endpoint": "tcp://node1:5555",
}
ELASTIC_TWO_NODES = {**TWO_NODES, "membership.mode": MembershipMode.elastic} | {
    "rollout.collectives": Collectives.gloo
}
JSONL = {"data.source": DataSource.jsonl, "data.path": "a.jsonl", "data.reward": "exact"}

REFUSED = [
    # (changes, key that is named, part of the text)
    ({"rollout.ep_size": 16}, "rollout.ep_size", "model.num_experts=8"),
    ({"rollout.ep_size": 3}, "rollout.ep_size", "one of 1, 2, 4, 8"),
    ({"rollout.ep_size": 0}, "rollout.ep_size", "at least 1"),
    ({"rollout.ep_size": 8}, "rollout.ep_size", "10 processes on a host that may run 8"),
    ({**GPU, "cluster.num_devices_per_node": 2}, "rollout.ep_size", "more ranks than the 2 devices"),
    (
        {**TWO_NODES, "rollout.collectives": Collectives.gloo, "cluster.server_url": None}
        | {"cluster.num_devices_per_node": 3},
        "rollout.ep_size",
        "one node has 3 devices",
    ),
    (
        {**TWO_NODES, "rollout.collectives": Collectives.gloo, "cluster.trainer_endpoint": None}
        | {"cluster.num_devices_per_node": 6, "trainer.num_ranks": 8},
        "trainer.num_ranks",
        "one node has 6 devices",
    ),
    ({**STATIC, "release.use": ReleaseUse.exit}, "release.use", "nobody leaves a static group"),
    ({"release.command": ["true"]}, "release.command", "nothing runs it with release.use=park"),
    ({"release.use": ReleaseUse.command}, "release.command", "names no command to run"),
    ({"trainer.ep_size": 3, "trainer.num_ranks": 3}, "trainer.ep_size", "one of 1, 2, 4, 8"),
    ({"trainer.num_ranks": 3}, "trainer.num_ranks", "multiple of 2"),
    ({"trainer.tp_size": 4, "trainer.num_ranks": 2}, "trainer.num_ranks", "trainer.tp_size"),
    ({"trainer.expert_tp_size": 2}, "trainer.num_ranks", "trainer.expert_tp_size"),
    ({"trainer.pp_size": 2, "trainer.num_ranks": 4}, "trainer.pp_size", "one of 1, 3"),
    ({"rollout.max_response_tokens": 241}, "rollout.max_response_tokens", "at most 240"),
    ({"rollout.max_prompt_tokens": 300}, "rollout.max_response_tokens", "shorten rollout.max_prompt_tokens"),
    ({"rollout.kv_cache_tokens": 207}, "rollout.kv_cache_tokens", "to 208 or more"),
    ({"rollout.num_responses_per_prompt": 1}, "rollout.num_responses_per_prompt", "2 or more"),
    (
        {"rollout.num_responses_per_prompt": 1, "algorithm.advantage_norm": AdvantageNorm.group_mean},
        "rollout.num_responses_per_prompt",
        "group_mean",
    ),
    ({"algorithm.num_minibatches": 3}, "algorithm.num_minibatches", "=512"),
    ({"algorithm.num_minibatches": 512}, "algorithm.num_minibatches", "at most 256"),
    ({"data.drop_last": True, "data.num_prompts": 31}, "data.num_prompts", "32 or more"),
    ({"cluster.trainer_endpoint": "ipc:///run/t"}, "cluster.trainer_endpoint", "warmed up"),
    ({"trainer.optimizer_offload": True}, "trainer.optimizer_offload", "host memory anyway"),
    ({"rollout.collectives": Collectives.nccl}, "rollout.collectives", "cluster.device=cpu"),
    ({"cluster.device": Device.cuda}, "rollout.collectives", "rollout.collectives=nccl"),
    (TWO_NODES, "rollout.collectives", "cluster.num_nodes=2"),
    (
        {**TWO_NODES, "rollout.collectives": Collectives.gloo, "trainer.weight_sync": WeightSyncPath.tensor},
        "trainer.weight_sync",
        "cluster.num_nodes=2",
    ),
    (
        {**STATIC, "trainer.weight_sync": WeightSyncPath.tensor, "cluster.server_url": "http://other:1"},
        "trainer.weight_sync",
        "the server is on other, the trainer on localhost",
    ),
    (JSONL, "data.source", "data=arithmetic"),
    ({"model.dtype": Dtype.bfloat16}, "model.expert_bytes", "98304"),
    ({"model.tiny.num_layers": 2}, "model.num_layers", "set model.num_layers=2"),
    ({"model.tiny.top_k": 1}, "model.num_active_experts", "set model.num_active_experts=1"),
    ({"model.tiny.head_dim": 64}, "model.kv_bytes_per_token", "3072"),
    ({"model.tiny.num_kv_heads": 3}, "model.tiny.num_kv_heads", "divisor of 4"),
    ({"cluster.device_memory_bytes": 20_000_000}, "rollout.ep_size", "0.05 GiB KV cache"),
    (
        {"cluster.device_memory_bytes": 10_000_000, "rollout.kv_cache_tokens": 208},
        "trainer.num_ranks",
        "Adam",
    ),
    ({"rollout.top_p": 0.9}, "rollout.top_p", "logprobs"),
    ({"rollout.temperature": 0.0}, "rollout.temperature", "above 0"),
    ({"rollout.temperature": 0.7}, "rollout.temperature", "at temperature 1"),
    ({"rollout.temperature": math.nan}, "rollout.temperature", "finite"),
    ({"rollout.max_running_requests": 3}, "rollout.max_running_requests", "4 or more"),
    ({"rollout.response_timeout_s": -1.0}, "rollout.response_timeout_s", "above 0"),
    ({"rollout.server_args": {"--ep_size": 2}}, "rollout.server_args.--ep_size", "set rollout.ep_size"),
    ({"rollout.server_args": {"port": 1}}, "rollout.server_args.port", "cluster.server_url"),
    ({"rollout.server_args": {"pp-size": 2}}, "rollout.server_args.pp-size", "remove it"),
    ({"rollout.server_args": {"json-args": {"a": 1}}}, "rollout.server_args.json-args", "one text"),
    ({"algorithm.clip_low": 1.0}, "algorithm.clip_low", "below 1"),
    ({"algorithm.clip_high": -0.1}, "algorithm.clip_high", "0 or more"),
    ({"algorithm.kl_coef": -0.1}, "algorithm.kl_coef", "0 or more"),
    ({"algorithm.importance_cap": 0.5}, "algorithm.importance_cap", "1 or more"),
    ({"trainer.learning_rate": -1e-6}, "trainer.learning_rate", "0 or more"),
    ({"trainer.adam_beta2": 1.0}, "trainer.adam_beta2", "below 1"),
    ({"trainer.max_grad_norm": 0.0}, "trainer.max_grad_norm", "above 0"),
    ({"cluster.server_url": "localhost:30000"}, "cluster.server_url", "http://HOST:PORT"),
    ({"cluster.server_url": "http://host:port"}, "cluster.server_url", "http://HOST:PORT"),
    ({"cluster.trainer_endpoint": "tcp://host"}, "cluster.trainer_endpoint", "tcp://HOST:PORT"),
    ({"cluster.trainer_endpoint": "ipc://"}, "cluster.trainer_endpoint", "ipc://PATH"),
    ({"cluster.server_start_timeout_s": 0.0}, "cluster.server_start_timeout_s", "above 0"),
    ({"data.path": "a.jsonl"}, "data.path", "data.path=null"),
    ({"data.num_prompts": None}, "data.num_prompts", "data.num_prompts="),
    ({"data.num_prompts": 0}, "data.num_prompts", "at least 1"),
    ({"data.task": "chain_sum"}, "data.task", "data.task=null"),
    ({"data.source": DataSource.reasoning_gym, "data.reward": "exact"}, "data.task", "chain_sum"),
    ({**JSONL, "data.path": None}, "data.path", "file or folder"),
    ({**JSONL, "data.reward": "arithmetic"}, "data.reward", "data.source=jsonl"),
    ({"data.reward": "nothing"}, "data.reward", "math_verify"),
    ({"data.reward": "a.b:"}, "data.reward", "module:function"),
    ({"data.reward_timeout_s": -1.0}, "data.reward_timeout_s", "above 0"),
    ({"model.source": ModelSource.hf, "model.path": None}, "model.path", "Hugging Face checkpoint"),
    ({"model.path": None}, "model.path", "e.g. runs/models"),
    ({"model.num_active_experts": 9}, "model.num_active_experts", "at most 8"),
    ({"membership.floor": 0}, "membership.floor", "at least 1"),
    ({"membership.floor": 5}, "membership.floor", "set membership.floor to 1 ... 4"),
    ({"scheduling.price": -0.5}, "scheduling.price", "0 or more"),
    (
        {"scheduling.batching": Batching.length_bucketed, "algorithm.loss_agg": LossAgg.token_mean},
        "algorithm.loss_agg",
        "set algorithm.loss_agg=sequence_mean or fixed",
    ),
    (
        {**STATIC, "scheduling.starting_size": StartingSize.auto},
        "scheduling.starting_size",
        "membership=elastic",
    ),
    ({"scheduling.model_tokens_per_token": 64}, "scheduling.model_tokens_per_token", "clock=h200"),
    ({"scheduling.window_steps": 0}, "scheduling.window_steps", "1 or more"),
    ({"scheduling.min_rank_correlation": 1.5}, "scheduling.min_rank_correlation", "in that range"),
    ({"membership.operation_timeout_s": 0.0}, "membership.operation_timeout_s", "above 0"),
    ({"membership.park_frees": ["kv", "disk"]}, "membership.park_frees", "unknown: disk"),
    ({"rollout.ep_size": 1}, "membership.mode", "or choose membership=static"),
    (ELASTIC_TWO_NODES, "membership.folder", "must find its membership manager"),
    ({"release.use": ReleaseUse.slurm}, "cluster.server_url", "has one node only"),
    ({"release.every_step": True}, "release.every_step", "ends no worker before the last step"),
    (
        {"release.every_step": True, "release.use": ReleaseUse.exit}
        | {"cluster.server_url": "http://localhost:30000", "membership.folder": "m"},
        "release.every_step",
        "did not start this server",
    ),
    ({"cluster.server_url": "http://localhost:30000"}, "membership.folder", "--flexfloor-folder"),
    ({"num_steps": 0}, "num_steps", "at least 1"),
    ({"seed": 2**31}, "seed", "31 bits"),
    ({"run_dir": ""}, "run_dir", "names no folder"),
    ({"rollout.num_prompt_groups": "???"}, "rollout.num_prompt_groups", "has no value"),
]


@pytest.mark.parametrize(
    ("changes", "key", "part"), REFUSED, ids=[f"{c[1]}-{n}" for n, c in enumerate(REFUSED)]
)
def test_refuses_and_names_the_key(quickstart, change, changes, key, part) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(change(quickstart, changes), check_files=False)
    assert caught.value.key == key
    assert part in str(caught.value)
    assert "Fix: " in str(caught.value)


ACCEPTED = [
    {},
    {"trainer.learning_rate": 0.0},  # the control run
    {"rollout.kv_cache_tokens": 208},
    {"rollout.kv_cache_tokens": None},
    {"rollout.max_response_tokens": 240},
    {"rollout.num_responses_per_prompt": 2},
    {"algorithm.num_minibatches": 256},
    {"algorithm.importance_cap": None},
    {"algorithm.importance_cap": 1.0},
    {"data.drop_last": True, "data.num_prompts": 32},
    {"data.reward": "my.rewards:score"},
    {"rollout.server_args": {"chunked-prefill-size": 4096}},
    {
        **CHECKPOINT,
        **STATIC,
        "cluster.server_url": "http://localhost:30000",
        "cluster.trainer_endpoint": "ipc:///run/trainer",
    },
    {**STATIC, "cluster.server_url": "http://localhost:30000", "trainer.weight_sync": WeightSyncPath.tensor},
    {"cluster.server_url": "http://localhost:30000", "membership.folder": "/run/m"},
    {"membership.floor": 4},
    {**STATIC, "membership.floor": 5},
    {**STATIC, "rollout.ep_size": 1},
    {"scheduling.price": 0.0, "membership.park_frees": []},
    {"membership.park_frees": ["dense", "kv", "experts"]},
    {**CHECKPOINT, **TWO_NODES, "rollout.collectives": Collectives.gloo},
    {"cluster.num_devices_per_node": 6},
    GPU,
]


@pytest.mark.parametrize("changes", ACCEPTED, ids=[" ".join(c) or "as it is" for c in ACCEPTED])
def test_accepts_what_stands_just_inside_a_rule(quickstart, change, changes) -> None:
    validate(change(quickstart, changes), check_files=False)
