"""What a resumed run may do otherwise than before, and a digest of all that it may not. PURE.

A resumed run draws and learns what it would have without the break, so everything that decides what is drawn
or learnt stays. What only says where and how fast it happens may change.
"""

import hashlib
import json
from dataclasses import asdict
from enum import Enum
from typing import Any

from flexfloor.config.schema import TrainConfig

_GROUPS = ("cluster", "membership", "release", "logging")
_KEYS = {
    *("num_steps", "save_hf", "run_dir", "resume", "model.path", "data.path", "data.reward_workers"),
    *("data.reward_timeout_s", "rollout.max_attempts", "rollout.response_timeout_s", "rollout.collectives"),
    *("rollout.stream_interval_tokens", "rollout.server_args", "rollout.max_running_requests"),
    *("rollout.kv_cache_tokens", "trainer.checkpoint_every_steps", "trainer.checkpoint_keep"),
    *("trainer.step_timeout_s", "trainer.weight_sync", "trainer.weight_bucket_bytes"),
    *("scheduling.placement", "scheduling.starting_size", "scheduling.release", "scheduling.price"),
    *("scheduling.wall_budget", "scheduling.moving", "scheduling.decision_interval_iterations"),
    *("scheduling.clock", "scheduling.model_tokens_per_token"),
}
SHOWN = "num_steps, save_hf, cluster.*, membership.*, release.*, logging.*, timeouts and trainer.checkpoint_*"
"""For a refusal; the documentation has them all."""


def may_change(key: str) -> bool:
    """Whether a resume may give this key, in dotted form, another value."""
    if key.partition(".")[0] in _GROUPS:
        return True
    return any(key == name or key.startswith(f"{name}.") for name in _KEYS)


def config_digest(config: TrainConfig) -> str:
    """Of every value that may not change: equal digests, equal draws and gradients."""
    kept = {key: value for key, value in _flat(asdict(config), "") if not may_change(key)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _flat(values: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not may_change(key):
            found += _flat(value, f"{key}.")
        else:
            found.append((key, value.value if isinstance(value, Enum) else value))
    return found
