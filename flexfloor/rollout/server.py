"""The command line of the server that a run starts. PURE.

`rollout.server_args` adds flags. Those that a configuration key decides are refused with the configuration;
what is refused here are those that every run needs as they are.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from flexfloor.config import RolloutConfig, TrainConfig
from flexfloor.config.schema import Collectives, MembershipConfig, MembershipMode
from flexfloor.errors import ConfigError


def server_argv(
    config: TrainConfig,
    *,
    port: int,
    model_path: str,
    host: str = "127.0.0.1",
    weight_version: int = 0,
    membership_folder: Path | None = None,
    iteration_log_folder: Path | None = None,
) -> list[str]:
    """Argument vector of the flexfloor-serve that this run needs, ready for exec.

    `port`: SGLang takes more ports above it, see `ports`. `weight_version`: of the weights in `model_path`.
    `iteration_log_folder`: where each rank logs its iterations, see `iteration_log`.
    Raises ConfigError where `rollout.server_args` names a flag that every run sets.
    """
    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "model-path": model_path,
        "weight-version": weight_version,
        **_model_flags(config),
        **_group_flags(config.rollout),
        **_serving_flags(config.rollout),
        **_membership_flags(config.membership, membership_folder),
        **_log_flags(iteration_log_folder),
    }
    flags |= _extra(config.rollout, flags)
    return [sys.executable, "-m", "sglang_patches.serve", *_written(flags)]


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
            # Left out, and refused: group-wide weight updates need control requests in lockstep.
            "enable-dp-attention-local-control-broadcast": None,
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


def _membership_flags(membership: MembershipConfig, folder: Path | None) -> dict[str, object]:
    if membership.mode is MembershipMode.static:
        return {}
    return {
        "flexfloor-membership": "elastic",
        "flexfloor-floor": membership.floor,
        "flexfloor-folder": folder,
        "flexfloor-expert-slots": membership.expert_slots and membership.expert_slots.value,
        "flexfloor-park-frees": ",".join(membership.park_frees),
        "flexfloor-member-sets": _joined(membership.member_sets),
        "flexfloor-prepare-timeout": membership.operation_timeout_s,
        "flexfloor-recovery": "auto" if membership.recovery else "off",
        "flexfloor-heartbeat-timeout-s": membership.heartbeat_timeout_s,
    }


def _log_flags(folder: Path | None) -> dict[str, object]:
    return {} if folder is None else {"flexfloor-iteration-log": folder}


def _joined(member_sets: list[list[int]]) -> str | None:
    return ";".join(",".join(map(str, members)) for members in member_sets) or None


def _extra(rollout: RolloutConfig, ours: dict[str, object]) -> dict[str, object]:
    extra = {flag.lstrip("-").replace("_", "-"): (flag, value) for flag, value in rollout.server_args.items()}
    for name, (flag, value) in extra.items():
        if name in ours:
            problem = f"every run sets it to {ours[name]!r}"
            raise ConfigError(f"rollout.server_args.{flag}", value, problem, "remove it")
    return {name: value for name, (_, value) in extra.items()}


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
