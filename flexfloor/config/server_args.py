"""Which SGLang flags FlexFloor sets itself, so that `rollout.server_args` cannot contradict a key."""

from collections.abc import Mapping

from flexfloor.errors import ConfigError

_OWNER_OF_FLAG: Mapping[str, str] = {
    "model": "model.path",
    "model-path": "model.path",
    "tokenizer-path": "model.path",
    "dtype": "model.dtype",
    "context-length": "model.context_tokens",
    "device": "cluster.device",
    "host": "cluster.server_url",
    "port": "cluster.server_url",
    "nnodes": "cluster.num_nodes",
    "node-rank": "cluster.num_nodes",
    "dist-init-addr": "cluster.server_url",
    "tp": "rollout.ep_size",
    "tp-size": "rollout.ep_size",
    "tensor-parallel-size": "rollout.ep_size",
    "dp": "rollout.ep_size",
    "dp-size": "rollout.ep_size",
    "data-parallel-size": "rollout.ep_size",
    "attn-dp-size": "rollout.ep_size",
    "ep": "rollout.ep_size",
    "ep-size": "rollout.ep_size",
    "expert-parallel-size": "rollout.ep_size",
    "enable-dp-attention": "rollout.ep_size",
    "max-running-requests": "rollout.max_running_requests",
    "max-total-tokens": "rollout.kv_cache_tokens",
    "stream-interval": "rollout.stream_interval_tokens",
    "enable-deterministic-inference": "rollout.deterministic",
    "random-seed": "seed",
    "load-balance-method": "scheduling.placement",
    "flexfloor-membership": "membership.mode",
    "flexfloor-floor": "membership.floor",
    "flexfloor-folder": "membership.folder",
    "flexfloor-bind": "membership.folder",
    "flexfloor-expert-slots": "membership.expert_slots",
    "flexfloor-park-frees": "membership.park_frees",
    "flexfloor-member-sets": "membership.member_sets",
    "flexfloor-prepare-timeout": "membership.operation_timeout_s",
}
_UNSUPPORTED_FLAGS = ("pp", "pp-size", "pipeline-parallel-size", "elastic-ep-backend", "max-ep-size")
_VALUE_TYPES = (bool, int, float, str)


def check_server_args(server_args: Mapping[str, object]) -> None:
    for flag, value in server_args.items():
        _check_flag(flag, value)


def _check_flag(flag: str, value: object) -> None:
    key = f"rollout.server_args.{flag}"
    name = flag.lstrip("-").replace("_", "-")
    owner = _OWNER_OF_FLAG.get(name)
    if owner is not None:
        raise ConfigError(key, value, f"FlexFloor sets this flag from {owner}", f"remove it and set {owner}")
    if name in _UNSUPPORTED_FLAGS:
        raise ConfigError(key, value, "the rollout's EP group has no such topology", "remove it")
    is_plain = value is None or isinstance(value, _VALUE_TYPES)
    if not (is_plain or (isinstance(value, list) and all(isinstance(item, _VALUE_TYPES) for item in value))):
        raise ConfigError(
            key, value, "a flag's value is a number, a text, or a list of them", "write it as one text"
        )
