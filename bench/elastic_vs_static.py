"""What elastic membership saves on one server, and what a switch costs.

    python bench/elastic_vs_static.py [--rollouts 6] [--seed 0] [--collectives shm] [--big]

Static and elastic rollouts alternate on one server of 4 ranks, with the same requests: a long tail of
lengths, four responses a rank, each rank released when its own are done. The server counts worker-iterations.

--big   a model with 100 MB of experts moved per survivor at 4 -> 2: the stall must not grow with it.

The last line is one JSON object. A stall is what survivors lose at the switch, beside one decode iteration
of the group before it. The transfer runs before, beside decoding; `decode_slowdown_during_transfer` is what
it costs there: median time between tokens of survivors while a release is being prepared / before it.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "elastic"))

import requests as http
from rollouts import Request, compare, make_requests, run_elastic, run_static
from server import Server, start_server
from sharp_model import BIG, sharp_tiny_moe

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses

NUM_RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collectives", choices=("gloo", "shm"), default="shm")
    parser.add_argument("--expert-slots", choices=("exact", "reserved"), default="exact")
    parser.add_argument("--big", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ChildProcesses() as children:
        root = Path(folder)
        model = sharp_tiny_moe(root / "model", **(BIG if options.big else {}))
        flags = ["--flexfloor-membership", "elastic", "--flexfloor-folder", str(root / "membership")]
        flags += ["--flexfloor-collectives", options.collectives]
        flags += ["--flexfloor-expert-slots", options.expert_slots]
        server = start_server(children, model, NUM_RANKS, root / "server.log", flags)
        server.wait_ready(deadline_s=400)
        with DriverClient(Endpoint.read(root / "membership"), timeout_s=120) as client:
            rows = [measure(server, client, options.seed + index) for index in range(options.rollouts)]
            transfers = [transfer(server, client) for _ in range(3)]
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    print(table(rows), file=sys.stderr)
    print(json.dumps(figures(rows, transfers, vars(options))))


def measure(server: Server, client: DriverClient, seed: int) -> dict[str, Any]:
    """One static and one elastic rollout of the same requests."""
    generator = random.Random(seed)
    tail = [[max(4, int(160 * generator.random() ** 2.5)) for _ in range(4)] for _ in range(NUM_RANKS)]
    requests = make_requests(tail, seed=seed)
    static, oracle = counted(server, lambda: run_static(server, requests))
    elastic, (answers, results) = counted(server, lambda: run_elastic(server, client, requests), client)
    stalls = [switch.stall_s for switch in client.status().last_switches[-len(results) - 1 :]]
    num_tokens = sum(request.num_tokens for request in requests)
    return {
        "seed": seed,
        "num_tokens": num_tokens,
        "mismatches": len(compare(oracle, answers).mismatches),
        "static_worker_iterations": sum(static["iterations"]),
        "elastic_worker_iterations": sum(elastic["iterations"]),
        "static_idle_worker_iterations": sum(static["idle"]),
        "elastic_idle_worker_iterations": sum(elastic["idle"]),
        "static_s": static["took_s"],
        "elastic_s": elastic["took_s"],
        "static_iteration_s": static["took_s"] / max(static["iterations"]),
        "stalls_s": stalls,
    }


def counted(server: Server, work: Any, client: DriverClient | None = None) -> tuple[dict[str, Any], Any]:
    """Run it and read the ranks' counters around it; with a client, bring everybody back first."""
    before, started_s = server.counters(), time.monotonic()
    result = work()
    took_s = time.monotonic() - started_s
    if client is not None:
        assert client.rejoin().ok
    after = server.counters()
    pairs = list(zip(before, after, strict=True))
    return {
        "took_s": round(took_s, 3),
        "iterations": [b["num_iterations"] - a["num_iterations"] for a, b in pairs],
        "idle": [b["num_idle_iterations"] - a["num_idle_iterations"] for a, b in pairs],
    }, result


def transfer(server: Server, client: DriverClient) -> dict[str, float]:
    """Times between tokens on two survivors before and while the two other ranks hand over their experts."""
    times: dict[int, list[float]] = {0: [], 1: []}
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, server, rank, times[rank]) for rank in times]
        threading.Event().wait(1.5)
        asked_s = time.monotonic()
        assert client.release([2, 3]).ok
        done_s = time.monotonic()
        for future in streams:
            future.result(120)
    switch = client.status().last_switches[-1]
    assert client.rejoin().ok
    before = gaps(times, asked_s - 1.0, asked_s)
    during = gaps(times, asked_s, done_s) or before
    return {
        "prepare_s": done_s - asked_s,
        "stall_s": switch.stall_s,
        "num_bytes": switch.num_bytes,
        "iteration_s": statistics.median(before),
        "slowdown": statistics.median(during) / statistics.median(before),
    }


def stream(server: Server, rank: int, times: list[float]) -> None:
    """Decode 160 tokens on this rank, noting when each arrives."""
    request = Request(prompt=(5, 6, 7 + rank), num_tokens=160, dp_rank=rank)
    body = {
        "input_ids": list(request.prompt),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": request.num_tokens, "ignore_eos": True},
        "routed_dp_rank": rank,
        "stream": True,
    }
    with http.post(f"{server.url}/generate", json=body, stream=True, timeout=120) as reply:
        for line in reply.iter_lines():
            if line:
                times.append(time.monotonic())


def gaps(times: dict[int, list[float]], first_s: float, last_s: float) -> list[float]:
    """Times between consecutive tokens that arrived within the window."""
    found = []
    for arrived in times.values():
        inside = [at for at in arrived if first_s <= at <= last_s]
        found += [b - a for a, b in pairwise(inside)]
    return found


def figures(
    rows: list[dict[str, Any]], transfers: list[dict[str, float]], options: dict[str, Any]
) -> dict[str, Any]:
    """The figures of the last line."""
    static = sum(row["static_worker_iterations"] for row in rows)
    elastic = sum(row["elastic_worker_iterations"] for row in rows)
    tokens = sum(row["num_tokens"] for row in rows)
    stalls = [stall for row in rows for stall in row["stalls_s"]] + [row["stall_s"] for row in transfers]
    iteration_s = statistics.median(row["static_iteration_s"] for row in rows)
    return {
        "bench": "elastic_vs_static",
        **options,
        "num_tokens": tokens,
        "mismatches": sum(row["mismatches"] for row in rows),
        "static_worker_iterations": static,
        "elastic_worker_iterations": elastic,
        "static_tokens_per_worker_iteration": round(tokens / static, 4),
        "elastic_tokens_per_worker_iteration": round(tokens / elastic, 4),
        "tokens_per_worker_iteration_ratio": round(static / elastic, 4),
        "static_idle_share": round(sum(r["static_idle_worker_iterations"] for r in rows) / static, 4),
        "elastic_idle_share": round(sum(r["elastic_idle_worker_iterations"] for r in rows) / elastic, 4),
        "wall_ratio": round(sum(r["elastic_s"] for r in rows) / sum(r["static_s"] for r in rows), 4),
        "num_switches": len(stalls),
        "switch_stall_median_ms": round(1e3 * statistics.median(stalls), 3),
        "switch_stall_max_ms": round(1e3 * max(stalls), 3),
        "decode_iteration_ms": round(1e3 * iteration_s, 3),
        "switch_stall_per_iteration": round(statistics.median(stalls) / iteration_s, 4),
        "bytes_moved_at_4_to_2": int(transfers[-1]["num_bytes"]),
        "prepare_at_4_to_2_s": [round(row["prepare_s"], 3) for row in transfers],
        "stall_at_4_to_2_ms": [round(1e3 * row["stall_s"], 3) for row in transfers],
        "iteration_at_4_to_2_ms": [round(1e3 * row["iteration_s"], 3) for row in transfers],
        "decode_slowdown_during_transfer": round(statistics.median(row["slowdown"] for row in transfers), 3),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Static against elastic, one line a rollout."""
    lines = [f"{'seed':>6} {'tokens':>8} {'worker-iterations':>22} {'tail idle':>17} {'seconds':>15}"]
    for row in rows:
        static, elastic = row["static_worker_iterations"], row["elastic_worker_iterations"]
        idle = row["static_idle_worker_iterations"] / static, row["elastic_idle_worker_iterations"] / elastic
        lines.append(
            f"{row['seed']:>6} {row['num_tokens']:>8} {static:>10} -> {elastic:>8} "
            f"{idle[0]:>7.3f} -> {idle[1]:>6.3f} {row['static_s']:>6.2f} -> {row['elastic_s']:>5.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
