"""Random rollouts under random leaves, rejoins, wakes, cancels and delays, compared with the static group.

    python bench/soak_membership.py [--rollouts 300] [--seed 0] [--delays 0.002,0.2,2.0,0] [--serve-flag=F]

A mismatch counts where the oracle's two likeliest tokens are further apart than 1e-4. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "elastic"))

from server import start_server
from sharp_model import sharp_tiny_moe
from soak import soak

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--delays", default="0.002,0.2,2.0,0", help="probability,min_s,max_s,seed; empty: none"
    )
    parser.add_argument("--collectives", choices=("gloo", "shm"), default="shm")
    parser.add_argument("--serve-flag", action="append", default=[], help="one more flag of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ChildProcesses() as children:
        root = Path(folder)
        flags = ["--flexfloor-membership", "elastic", "--flexfloor-folder", str(root / "membership")]
        flags += ["--flexfloor-collectives", options.collectives, *options.serve_flag]
        if options.delays:
            flags += ["--flexfloor-delays", options.delays]
        server = start_server(children, sharp_tiny_moe(root / "model"), 4, root / "server.log", flags)
        server.wait_ready(deadline_s=400)
        started_s = time.monotonic()
        with DriverClient(Endpoint.read(root / "membership"), timeout_s=300) as client:
            result = soak(server, client, num_rollouts=options.rollouts, seed=options.seed)
            status = client.status()
    for line in result.mismatches:
        print(line, file=sys.stderr)
    figures = {key: value for key, value in asdict(result).items() if key != "mismatches"}
    print(
        json.dumps(
            {
                "bench": "soak_membership",
                "seed": options.seed,
                "delays": options.delays,
                "rollouts_identical": result.num_identical,
                "hangs": result.num_hangs,
                **figures,
                "membership_epoch": status.membership_epoch,
                "took_s": round(time.monotonic() - started_s, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
