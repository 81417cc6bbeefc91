"""The command line of the server that a run starts. PURE.

Every flag that the run's own configuration decides is written here; `rollout.server_args` adds to them and
may not contradict them.
"""

import sys
from collections.abc import Iterable, Iterator

from flexfloor.config import RolloutConfig, TrainConfig
from flexfloor.config.schema import Collectives
from flexfloor.errors import ConfigError

# SGLang's other spellings of flags that we set: a contradiction must not slip in under another name.
_SPELLINGS = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "attn-dp-size": "dp-size",
    "attention-data-parallel-size": "dp-size",
    "model": "model-path",
}

# Who decides a flag, for the fix in the error text; flags that are not here are fixed for every run.
_DECIDED_BY = {
    "context-length": "model.context_tokens",
    "device": "cluster.device",
    "dp-size": "rollout.ep_size",
    "dtype": "model.dtype",
    "enable-deterministic-inference": "rollout.deterministic",
    "ep-size": "rollout.ep_size",
    "flexfloor-collectives": "rollout.collectives",
    "max-running-requests": "rollout.max_running_requests",
    "max-total-tokens": "rollout.kv_cache_tokens",
    "model-path": "model.path",
    "random-seed": "seed",
    "stream-interval": "rollout.stream_interval_tokens",
    "tp-size": "rollout.ep_size",
}


def server_argv(
    config: TrainConfig, *, port: int, model_path: str, host: str = "127.0.0.1", weight_version: int = 0
) -> list[str]:
    """Argument vector of the flexfloor-serve that this run needs, ready for exec.

    `port`: SGLang also uses up to 50 ports above it. `weight_version`: of the weights in `model_path`. Raises
    ConfigError where a value cannot work or `rollout.server_args` contradicts the rest of the configuration.
    """
    _check(config.rollout)
    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "model-path": model_path,
        "weight-version": weight_version,
        **_model_flags(config),
        **_group_flags(config.rollout),
        **_serving_flags(config.rollout),
    }
    flags |= _extra(config.rollout, flags)
    return [sys.executable, "-m", "sglang_patches.serve", *_written(flags)]


def _check(rollout: RolloutConfig) -> None:
    if rollout.ep_size < 1:
        raise ConfigError("rollout.ep_size", rollout.ep_size, "a group has at least one rank", "1 or more")
    if rollout.max_running_requests < rollout.ep_size:
        raise ConfigError(
            "rollout.max_running_requests",
            rollout.max_running_requests,
            f"the engine divides it by the {rollout.ep_size} ranks, and each must run at least one response",
            f"at least {rollout.ep_size}",
        )


def _model_flags(config: TrainConfig) -> dict[str, object]:
    return {
        "device": config.cluster.device.value,
        "dtype": config.model.dtype.value,
        "context-length": config.model.context_tokens,
        "random-seed": config.seed,
        "skip-tokenizer-init": True,
    }


def _group_flags(rollout: RolloutConfig) -> dict[str, object]:
    """One rank is one worker: attention data parallelism, experts and TP have the same width."""
    flags: dict[str, object] = dict.fromkeys(("tp-size", "ep-size", "dp-size"), rollout.ep_size)
    if rollout.ep_size > 1:
        flags |= {
            "enable-dp-attention": True,
            # Whatever is sharded over the whole group could not lose a rank later.
            "enable-dp-lm-head": True,
            "moe-dense-tp-size": 1,
            # Spares a collective of all ranks in every iteration.
            "enable-dp-attention-local-control-broadcast": True,
        }
    if rollout.collectives is not Collectives.nccl:
        flags["flexfloor-collectives"] = rollout.collectives.value
    return flags


def _serving_flags(rollout: RolloutConfig) -> dict[str, object]:
    flags: dict[str, object] = {
        "max-running-requests": rollout.max_running_requests,
        "stream-interval": rollout.stream_interval_tokens,
        # Without it every event repeats the whole response: cost grows with the square of its length.
        "incremental-streaming-output": True,
    }
    if rollout.kv_cache_tokens is not None:
        flags["max-total-tokens"] = rollout.kv_cache_tokens
    if rollout.deterministic:
        flags["enable-deterministic-inference"] = True
    return flags


def _extra(rollout: RolloutConfig, ours: dict[str, object]) -> dict[str, object]:
    extra: dict[str, object] = {}
    for key, value in rollout.server_args.items():
        flag = key.removeprefix("--").replace("_", "-")
        name = _SPELLINGS.get(flag, flag)
        _refuse_contradiction(key, name, value, ours)
        if name not in ours:
            extra[flag] = value
    return extra


def _refuse_contradiction(key: str, name: str, value: object, ours: dict[str, object]) -> None:
    decided_by = _DECIDED_BY.get(name)
    fix = f"set {decided_by} instead" if decided_by else "leave it out: a run needs it as it is"
    if name in ours:
        if str(ours[name]) != str(value):
            raise ConfigError(f"rollout.server_args.{key}", value, f"the run sets {name}={ours[name]!r}", fix)
    elif decided_by is not None and value not in (None, False):
        raise ConfigError(f"rollout.server_args.{key}", value, "the run decides this flag itself", fix)


def _written(flags: dict[str, object]) -> Iterator[str]:
    """True writes the bare flag, False and None leave it out, a list writes its values one after another."""
    for name, value in flags.items():
        if value is None or value is False:
            continue
        yield f"--{name}"
        if value is True:
            continue
        # OmegaConf hands plain lists on, but any sequence of values will do.
        values = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        yield from map(str, values)
