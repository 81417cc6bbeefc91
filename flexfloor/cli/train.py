"""`flexfloor-train`: compose, convert, refuse or run, anew or where another run ended."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from flexfloor.cli.compose import register, save_resolved, to_train_config
from flexfloor.cli.job import run_command
from flexfloor.cli.resume import resumed
from flexfloor.config import TrainConfig
from flexfloor.config.checks import require
from flexfloor.config.rules import validate


def main() -> int:
    register()
    return run_command("train", TrainConfig, _run)


def _run(node: DictConfig) -> int:
    node = resumed(node)
    config = to_train_config(node)
    validate(config)
    if config.resume is None:
        _refuse_other_run(config.run_dir)
    save_resolved(node, config.run_dir)
    # Imported here, so that --cfg, --help and a refusal never load torch.
    from flexfloor.driver import run

    return run(config)


def _refuse_other_run(run_dir: str) -> None:
    """A second run in a folder would take the first one's responses for its own."""
    is_taken = any(Path(run_dir, "ledger").glob("step-*"))
    fix = f"go on with it: flexfloor-train resume={run_dir}, or name another folder"
    require(not is_taken, "run_dir", run_dir, "there is a run in it already", fix)


if __name__ == "__main__":
    sys.exit(main())
