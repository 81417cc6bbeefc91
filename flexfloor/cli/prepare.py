"""`flexfloor-prepare`: what the nodes of a job need before their server and trainer start.

Takes the overrides of the flexfloor-train that follows, which must name cluster.server_url and
cluster.trainer_endpoint. Prints the path of the plan that `flexfloor-node` reads.
"""

import sys

from omegaconf import DictConfig

from flexfloor.cli.compose import register, to_train_config
from flexfloor.cli.job import run_command
from flexfloor.cli.resume import resumed
from flexfloor.config import TrainConfig
from flexfloor.config.rules import validate


def main() -> int:
    register()
    return run_command("train", TrainConfig, _prepare)


def _prepare(node: DictConfig) -> int:
    config = to_train_config(resumed(node))
    validate(config)
    # Imported here, so that --cfg, --help and a refusal never load torch.
    from flexfloor.driver.attached import prepare_nodes

    print(prepare_nodes(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
