"""`flexfloor-node`: becomes (exec) this node's part of the server or the trainer that a run attaches to.

    flexfloor-node server RUN_DIR --num-nodes 2 --node-rank 1 --address n1:21000 --bind tcp://n1:21040
    flexfloor-node trainer RUN_DIR --num-nodes 2 --node-rank 0 --address n3:21050
    flexfloor-node ports 64          # first of so many free ports in a row on this host
    flexfloor-node sweep 3 seed=0,1 scheduling=verl,flexfloor      # overrides of the sweep's job 3

RUN_DIR holds what `flexfloor-prepare` wrote. A rank of -1 is taken from SLURM_PROCID.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flexfloor.cli.sweep import sweep_job
from flexfloor.errors import FlexfloorError
from flexfloor.node_plan import PLAN_NAME, NodePlan, Place, decode_plan, server_argv_on, trainer_place
from flexfloor.rollout.ports import free_block

REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Does not return where it becomes a server or trainer; 2 where it refuses."""
    args = _parser().parse_args(argv)
    try:
        if args.what == "ports":
            print(free_block(args.count))
        elif args.what == "sweep":
            print("\n".join(sweep_job(args.overrides, args.number)))
        else:
            _become(args)
    except (ValueError, OSError, FlexfloorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _become(args: argparse.Namespace) -> None:
    plan = _read_plan(Path(args.run_dir))
    rank = int(os.environ.get("SLURM_PROCID", "0")) if args.node_rank < 0 else args.node_rank
    place = Place(num_nodes=args.num_nodes, node_rank=rank, address=args.address)
    if args.what == "server":
        command, environment = server_argv_on(plan, place, args.bind), dict(os.environ)
    else:
        command, environment = _trainer(plan, place)
    print("+", *command, file=sys.stderr, flush=True)
    os.execvpe(command[0], command, environment)


def _trainer(plan: NodePlan, place: Place) -> tuple[list[str], dict[str, str]]:
    from flexfloor.config.choices import Device
    from flexfloor.training.launch import trainer_argv, trainer_env

    host, port = trainer_place(plan, place)
    command = trainer_argv(
        plan.trainer_spec,
        plan.trainer_ranks,
        num_nodes=place.num_nodes,
        node_rank=place.node_rank,
        master_addr=host,
        master_port=port,
    )
    return command, trainer_env(os.environ, Device(plan.device))


def _read_plan(run_dir: Path) -> NodePlan:
    path = run_dir / PLAN_NAME
    try:
        return decode_plan(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: there is no such file. Fix: run flexfloor-prepare with this run_dir"
        ) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}. Fix: run flexfloor-prepare of this version again") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexfloor-node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whats = parser.add_subparsers(dest="what", required=True)
    for name in ("server", "trainer"):
        node = whats.add_parser(name)
        node.add_argument("run_dir")
        node.add_argument("--num-nodes", type=int, default=1, help="of this service")
        node.add_argument("--node-rank", type=int, default=0, help="-1: SLURM_PROCID")
        node.add_argument("--address", default="", help="HOST:PORT of node 0 where the nodes meet")
        if name == "server":
            node.add_argument("--bind", help="tcp://HOST:PORT of node 0 for the membership manager")
    ports = whats.add_parser("ports")
    ports.add_argument("count", type=int)
    sweep = whats.add_parser("sweep")
    sweep.add_argument("number", type=int, help="from 0, as in a multirun")
    sweep.add_argument("overrides", nargs="*")
    return parser


if __name__ == "__main__":
    sys.exit(main())
