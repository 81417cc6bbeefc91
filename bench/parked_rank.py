"""What a parked rank costs: its CPU while the others decode, and its memory over many parks.

    python bench/parked_rank.py [--cpu-s 30] [--cycles 10] [--frees experts,kv]

A model whose experts weigh 100 MB a rank on 4 ranks. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "elastic"))

import psutil
from rollouts import Request, generate
from server import Server, start_server
from sharp_model import BIG, sharp_tiny_moe

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses

RANK = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpu-s", type=float, default=30.0)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--frees", default="experts,kv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ChildProcesses() as children:
        root = Path(folder)
        flags = ["--flexfloor-membership", "elastic", "--flexfloor-folder", str(root / "membership")]
        flags += ["--flexfloor-collectives", "shm", "--flexfloor-park-frees", options.frees]
        model = sharp_tiny_moe(root / "model", **BIG)
        server = start_server(children, model, 4, root / "server.log", flags)
        server.wait_ready(deadline_s=400)
        process = psutil.Process(server.counters()[RANK]["pid"])
        with DriverClient(Endpoint.read(root / "membership"), timeout_s=120) as client:
            shares = cpu_shares(server, client, process, options.cpu_s)
            active_mb, parked_mb = memory(server, client, process, options.cycles)
    print(
        json.dumps(
            {
                "bench": "parked_rank",
                "frees": options.frees,
                "cpu_s": options.cpu_s,
                "parked_cpu_share": round(shares[0], 4),
                "decoding_cpu_share": round(shares[1], 4),
                "active_rss_mb_by_cycle": active_mb,
                "parked_rss_mb_by_cycle": parked_mb,
                "given_back_mb_by_cycle": [a - b for a, b in zip(active_mb, parked_mb, strict=True)],
            }
        )
    )


def cpu_shares(
    server: Server, client: DriverClient, process: psutil.Process, window_s: float
) -> tuple[float, float]:
    """Shares of a core that the parked rank and a decoding one take."""
    assert client.release([RANK]).ok
    decoding = psutil.Process(server.counters()[0]["pid"])
    stop = threading.Event()
    work = threading.Thread(target=keep_decoding, args=(server, stop))
    work.start()
    before = [cpu_s(one) for one in (process, decoding)]
    threading.Event().wait(window_s)
    after = [cpu_s(one) for one in (process, decoding)]
    stop.set()
    work.join()
    assert client.rejoin().ok
    parked, busy = ((b - a) / window_s for a, b in zip(before, after, strict=True))
    return parked, busy


def memory(
    server: Server, client: DriverClient, process: psutil.Process, num_cycles: int
) -> tuple[list[int], list[int]]:
    """Resident MB of the rank in the group, after it has served, and parked, per cycle."""
    active, parked = [], []
    for _ in range(num_cycles):
        generate(server, Request(prompt=(5, 6, 7), num_tokens=8, dp_rank=RANK))
        active.append(process.memory_info().rss >> 20)
        assert client.release([RANK]).ok
        # The memory is given back just after the group was told that the rank has left.
        threading.Event().wait(0.5)
        parked.append(process.memory_info().rss >> 20)
        assert client.rejoin().ok
    return active, parked


def keep_decoding(server: Server, stop: threading.Event) -> None:
    """Responses on another rank until told to stop."""
    while not stop.is_set():
        generate(server, Request(prompt=(5, 6, 7), num_tokens=50, dp_rank=0))


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of the process so far."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
