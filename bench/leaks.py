"""What a server holds after many rollouts in which ranks leave and return: it must not grow.

    python bench/leaks.py [--rollouts 200] [--warm-up 60] [--seed 0] [--collectives shm]

Random requests on 4 ranks of one server; each rank leaves when its own are done, and all return before the
next rollout. Counted per process of the server after the warm-up and at the end: file descriptors, threads,
resident memory, files of shared memory, and per rank the process groups of torch. `*_growth` is the largest
of any process. A group of ranks is made once per set of members and kept: 4 ranks have 15, so the warm-up
is long. After the server has ended: what it left in /dev/shm and in its folder of temporary files. The last
line is JSON.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path += [
    str(Path(__file__).parents[1] / "tests" / "integration" / room) for room in ("", "sglang", "elastic")
]

import psutil
from rollouts import compare, make_requests, run_elastic, run_static
from server import Server, start_server
from sharp_model import sharp_tiny_moe

from flexfloor.left_overs import SHARED_MEMORY, mapped_files
from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses

NUM_RANKS = 4
MIB = 1 << 20
END_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Of one process."""

    num_fds: int
    num_threads: int
    rss_mib: int
    num_shared_files: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=60, help="rollouts before the first count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collectives", choices=("gloo", "shm"), default="shm")
    options = parser.parse_args()
    before = shared_files()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "tmp").mkdir()
        # The server's temporary files, where they can be counted.
        os.environ["TMPDIR"] = str(root / "tmp")
        with ChildProcesses() as children:
            found = measure(children, root, options)
        left = sorted(path.name for path in (root / "tmp").iterdir())
    print(
        json.dumps(
            {
                "bench": "leaks",
                "seed": options.seed,
                "collectives": options.collectives,
                "rollouts": options.rollouts,
                **found,
                "shared_files_left": len(shared_files() - before),
                "temporary_files_at_end": len(left),
            }
        )
    )


def measure(children: ChildProcesses, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    flags = ["--flexfloor-membership", "elastic", "--flexfloor-folder", str(root / "m")]
    flags += ["--flexfloor-collectives", options.collectives]
    server = start_server(children, sharp_tiny_moe(root / "model"), NUM_RANKS, root / "server.log", flags)
    server.wait_ready()
    assert server.process is not None
    tree = [psutil.Process(server.process.pid), *server.process.descendants()]
    first, first_groups = {}, []
    num_mismatches = num_changes = 0
    with DriverClient(Endpoint.read(root / "m"), timeout_s=300) as client:
        for rollout in range(options.rollouts):
            if rollout == min(options.warm_up, options.rollouts - 1):
                first, first_groups = holdings(tree), groups(server)
            found, changes = one_rollout(server, client, random.Random(f"{options.seed}/{rollout}"), rollout)
            num_mismatches += found
            num_changes += changes
        status = client.status()
    last, last_groups = holdings(tree), groups(server)
    for pid in sorted(last):
        if pid in first:
            print(f"{names(pid):>28} {asdict(first[pid])} -> {asdict(last[pid])}", file=sys.stderr)
    end(server)
    return {
        "membership_epoch": status.membership_epoch,
        "releases": num_changes,
        "mismatches": num_mismatches,
        **totals("start", first),
        **totals("end", last),
        "process_groups_start": first_groups,
        "process_groups_end": last_groups,
        "num_processes_start": len(first),
        "num_processes_end": len(last),
        **growth(first, last),
    }


def end(server: Server) -> None:
    """Ask its main process alone: a signal to all would end the ranks before it can tell them to."""
    assert server.process is not None
    psutil.Process(server.process.pid).terminate()
    if not server.process.reap(END_LIMIT_S):
        raise SystemExit(f"the server did not end within {END_LIMIT_S:g} s of SIGTERM")


def one_rollout(server: Server, client: DriverClient, generator: random.Random, seed: int) -> tuple[int, int]:
    """(mismatches, releases); the oracle is the full group, in every tenth rollout."""
    lengths = [
        [generator.randrange(2, 12) for _ in range(generator.randrange(1, 3))] for _ in range(NUM_RANKS)
    ]
    requests = make_requests(lengths, seed=seed)
    answers, results = run_elastic(server, client, requests)
    assert client.rejoin().ok
    num_mismatches = 0
    if seed % 10 == 0:
        num_mismatches = len(compare(run_static(server, requests), answers).mismatches)
    return num_mismatches, sum(result.ok for result in results)


def holdings(tree: list[psutil.Process]) -> dict[int, Holdings]:
    found = {}
    for process in tree:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            found[process.pid] = Holdings(
                num_fds=process.num_fds(),
                num_threads=process.num_threads(),
                rss_mib=process.memory_info().rss // MIB,
                num_shared_files=len(mapped_files([process.pid])),
            )
    return found


def groups(server: Server) -> list[int]:
    """Process groups of each rank, as torch counts them."""
    return [row.get("num_process_groups", -1) for row in server.counters()]


def totals(when: str, found: dict[int, Holdings]) -> dict[str, int]:
    names_of = Holdings.__dataclass_fields__
    return {f"{name}_{when}": sum(getattr(row, name) for row in found.values()) for name in names_of}


def growth(first: dict[int, Holdings], last: dict[int, Holdings]) -> dict[str, int]:
    both = [(first[pid], last[pid]) for pid in first if pid in last]
    names_of = Holdings.__dataclass_fields__
    return {f"{name}_growth": max(getattr(b, name) - getattr(a, name) for a, b in both) for name in names_of}


def names(pid: int) -> str:
    """What the process calls itself."""
    process = psutil.Process(pid)
    return " ".join(process.cmdline())[-28:].strip() or process.name()


def shared_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


if __name__ == "__main__":
    main()
