"""The tiny model of the quickstart: created, warmed up on demonstrations, and kept for the next run.

The warm-up is supervised training by the very trainer that RL uses afterwards. Its demonstrations hold wrong
steps on purpose, so that reinforcement learning has something to remove.
"""

import hashlib
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

from flexfloor.config import TrainConfig
from flexfloor.config.checks import require
from flexfloor.config.schema import ModelSource, TinyModelConfig
from flexfloor.data.arithmetic import build_tokenizer, demonstrations
from flexfloor.data.tiny_moe import create_tiny_moe
from flexfloor.driver.services import Services
from flexfloor.report.console import RunConsole
from flexfloor.training.client import TrainerClient
from flexfloor.types import TrainSequence

_FORMAT = 1
"""Part of the cache key: raise it when the same config would give other weights."""


def prepare_model(config: TrainConfig, services: Services, console: RunConsole) -> Path:
    """The checkpoint folder that rollout and training start from."""
    assert config.model.path is not None
    if config.model.source is ModelSource.hf:
        return Path(config.model.path)
    target = Path(config.model.path) / f"tiny-{_cache_key(config.model.tiny)}"
    if target.exists():
        console.say(f"model: {target} (prepared before)")
        return target
    endpoint = config.cluster.trainer_endpoint
    problem = f"{target} is not there, and a tiny model is warmed up before the trainer of the run starts"
    fix = "run flexfloor-prepare with the same overrides first"
    require(endpoint is None, "cluster.trainer_endpoint", endpoint, problem, fix)
    _make_tiny(config, target, services, console)
    return target


def _cache_key(tiny: TinyModelConfig) -> str:
    text = json.dumps([_FORMAT, asdict(tiny)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _make_tiny(config: TrainConfig, target: Path, services: Services, console: RunConsole) -> None:
    tiny = config.model.tiny
    blank = Path(config.run_dir) / "tiny_blank"
    create_tiny_moe(
        blank,
        tokenizer=build_tokenizer(),
        num_layers=tiny.num_layers,
        hidden_size=tiny.hidden_size,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        num_experts=tiny.num_experts,
        top_k=tiny.top_k,
        moe_intermediate_size=tiny.moe_intermediate_size,
        seed=tiny.init_seed,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    if tiny.warmup_steps == 0:
        _move_into_place(blank, target)
        return
    warm = Path(config.run_dir) / "tiny_warm"
    with services.start_trainer(blank, "warm-up").ready() as trainer:
        _warm_up(tiny, trainer, console)
        trainer.save_hf(str(warm))
    _move_into_place(warm, target)
    shutil.rmtree(blank)


def _move_into_place(source: Path, target: Path) -> None:
    """Another run may have prepared the same model meanwhile; theirs is as good."""
    partial = target.with_name(f"{target.name}.{source.parent.name}.partial")
    shutil.move(source, partial)
    try:
        partial.rename(target)
    except OSError:
        shutil.rmtree(partial)


def _warm_up(tiny: TinyModelConfig, trainer: TrainerClient, console: RunConsole) -> None:
    num_pairs = tiny.warmup_steps * tiny.warmup_batch_size
    pairs = demonstrations(num_pairs, seed=tiny.init_seed, corrupt_share=tiny.warmup_corrupt_share)
    console.say(f"model: warming up, {tiny.warmup_steps} supervised steps (once; kept for later runs)")
    with console.phase("warm-up", tiny.warmup_steps) as advance:
        for step in range(tiny.warmup_steps):
            first = step * tiny.warmup_batch_size
            batch = [_demonstration(*pair) for pair in pairs[first : first + tiny.warmup_batch_size]]
            stats = trainer.train_step(batch, learning_rate=_cosine(tiny, step), objective="nll")
            advance(step + 1, f"loss {stats.loss:.3f}")


def _demonstration(prompt_token_ids: list[int], response_token_ids: list[int]) -> TrainSequence:
    return TrainSequence(
        prompt_token_ids=tuple(prompt_token_ids),
        response_token_ids=tuple(response_token_ids),
        rollout_logprobs=(),
        advantage=1.0,
    )


def _cosine(tiny: TinyModelConfig, step: int) -> float:
    """Cosine decay to a tenth, after a linear rise over the first 20 steps."""
    rise = min(1.0, (step + 1) / 20)
    decay = 0.55 + 0.45 * math.cos(math.pi * step / max(1, tiny.warmup_steps))
    return tiny.warmup_learning_rate * rise * decay
