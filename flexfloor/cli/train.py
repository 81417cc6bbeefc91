"""`flexfloor-train`: compose, convert, refuse or run."""

import sys

from omegaconf import DictConfig

from flexfloor.cli.compose import register, save_resolved, to_train_config
from flexfloor.cli.job import run_command
from flexfloor.config import TrainConfig
from flexfloor.config.rules import validate


def main() -> int:
    register()
    return run_command("train", TrainConfig, _run)


def _run(node: DictConfig) -> int:
    config = to_train_config(node)
    validate(config)
    save_resolved(node, config.run_dir)
    # Imported here, so that --cfg, --help and a refusal never load torch.
    from flexfloor.driver import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
