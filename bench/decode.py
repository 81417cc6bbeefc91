"""Decode speed of real CPU servers of the quickstart's model: ranks, collectives, SGLang's own MoE fallback.

    python bench/decode.py [--only 1_gloo 4_shm ...] [--num-repeats 5]

Uses the servers of tests/integration/sglang. The last line is one JSON object; speeds are medians.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "sglang"))

from server import Server, start_server

from flexfloor.data.arithmetic import build_tokenizer
from flexfloor.data.tiny_moe import create_tiny_moe
from flexfloor.processes import ChildProcesses

NUM_REQUESTS, NUM_TOKENS = 16, 64
NATIVE_MOE = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
CASES: dict[str, tuple[int, list[str]]] = {
    "1_sglang_moe": (1, ["--flexfloor-leave-out", NATIVE_MOE]),
    "1_gloo": (1, []),
    "2_gloo": (2, []),
    "2_shm": (2, ["--flexfloor-collectives", "shm"]),
    "4_gloo": (4, []),
    "4_shm": (4, ["--flexfloor-collectives", "shm"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--num-repeats", type=int, default=5)
    options = parser.parse_args()
    result: dict[str, float | int | str] = {"bench": "decode", "num_requests": NUM_REQUESTS}
    with tempfile.TemporaryDirectory() as folder:
        model_path = create_tiny_moe(Path(folder) / "model", tokenizer=build_tokenizer(), seed=0)
        for case in options.only:
            result |= measure(case, model_path, options.num_repeats)
            print(case, result, file=sys.stderr, flush=True)
    print(json.dumps(result | ratios(result)))


def ratios(result: dict[str, float | int | str]) -> dict[str, float]:
    """Speeds against each other, for the pairs of which both were measured."""
    pairs = {
        "1_rank_speedup_over_sglang_moe": ("1_gloo", "1_sglang_moe"),
        "2_rank_speedup_of_shm_over_gloo": ("2_shm", "2_gloo"),
        "4_rank_speedup_of_shm_over_gloo": ("4_shm", "4_gloo"),
    }
    found = {name: [result.get(f"{case}_tokens_per_s") for case in cases] for name, cases in pairs.items()}
    return {
        name: round(float(ours) / float(base), 2) for name, (ours, base) in found.items() if ours and base
    }


def measure(case: str, model_path: Path, num_repeats: int) -> dict[str, float]:
    """Start one server, warm it, and time `num_repeats` rollouts."""
    num_ranks, flags = CASES[case]
    with ChildProcesses() as children:
        started_s = time.monotonic()
        server = start_server(children, model_path, num_ranks, model_path.parent / f"{case}.log", flags)
        server.wait_ready(deadline_s=400)
        ready_s = time.monotonic() - started_s
        rollout_s(server)
        speeds = [NUM_REQUESTS * NUM_TOKENS / rollout_s(server) for _ in range(num_repeats)]
    return {
        f"{case}_tokens_per_s": round(statistics.median(speeds), 1),
        f"{case}_ready_s": round(ready_s, 1),
    }


def rollout_s(server: Server) -> float:
    """Seconds for all requests at once, spread evenly over the ranks."""

    def one(index: int) -> None:
        server.generate(
            input_ids=[5 + index, 6, 7],
            sampling_params={"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            routed_dp_rank=index % server.num_ranks if server.num_ranks > 1 else None,
        )

    started_s = time.monotonic()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        list(pool.map(one, range(NUM_REQUESTS)))
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
