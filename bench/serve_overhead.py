"""What `flexfloor-serve` costs where nobody uses it, and what a driver gains that knows only HTTP.

    python bench/serve_overhead.py [--only startup decode http_driver] [--num-pairs 5] [--num-ranks 4]

startup: from the start of the command to the first token, `flexfloor-serve` with a static group against
`python -m sglang.launch_server` with the CPU rows of the catalog and nothing else of ours (SGLang does not
start on such a CPU without them), in pairs. decode: tokens per second of the same two, which run side by side
and take turns, so that both meet the same load of the machine. The order changes from pair to pair; ratios
are of medians. http_driver: docs/examples/http_driver.py against a static server and against one with
`--flexfloor-release drained`: the same responses, counted by the ranks' own iteration counters. The last line
is one JSON object; every run's number stands in it.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "sglang"))

from decode import NUM_REQUESTS, NUM_TOKENS, rollout_s
from server import Server, server_flags
from sharp_model import sharp_tiny_moe

from flexfloor.processes import ChildProcesses
from flexfloor.rollout.ports import free_base_port
from sglang_patches import CONFIG_ENV, plugin_config
from sglang_patches.catalog import PATCHES
from sglang_patches.cpu import profile
from sglang_patches.plugin_config import PluginConfig
from sglang_patches.serve_args import parse

ROOT = Path(__file__).parents[1]
PARTS = ("startup", "decode", "http_driver")
NUM_DECODES = 4
"""Turns of decode for each pair that is asked for."""
FIRST_TOKEN_TIMEOUT_S = 900.0
SHM = ("--flexfloor-collectives", "shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--num-pairs", type=int, default=5)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=4, help="of the HTTP driver")
    parser.add_argument("--num-responses", type=int, default=64, help="of a step of the HTTP driver")
    options = parser.parse_args()
    result: dict[str, Any] = {"bench": "serve_overhead", "num_ranks": options.num_ranks}
    with tempfile.TemporaryDirectory() as folder:
        model = sharp_tiny_moe(Path(folder) / "model")
        for part, run in (("startup", startup), ("decode", decode), ("http_driver", http_driver)):
            if part in options.only:
                result |= run(model, options)
    print(json.dumps(result))


# Startup and decode.


def startup(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token, each server `num_pairs` times."""
    seen: dict[str, list[float]] = {kind: [] for kind in STARTS}
    for pair in range(options.num_pairs):
        for kind in sorted(STARTS, reverse=pair % 2 == 1):
            with STARTS[kind](model, options.num_ranks) as (server, started_s):
                wait_first_token(server)
                seen[kind].append(round(time.monotonic() - started_s, 2))
            print(f"pair={pair} {kind} startup_s={seen[kind][-1]:.1f}", file=sys.stderr)
    ratio = statistics.median(seen["patched"]) / statistics.median(seen["stock"])
    return {"startup_s": seen, "startup_ratio": round(ratio, 4)}


def decode(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both servers, which run side by side and take turns."""
    seen: dict[str, list[float]] = {kind: [] for kind in STARTS}
    with contextlib.ExitStack() as stack:
        servers = {kind: stack.enter_context(STARTS[kind](model, options.num_ranks))[0] for kind in STARTS}
        for server in servers.values():
            wait_first_token(server)
            rollout_s(server)
        for pair in range(NUM_DECODES * options.num_pairs):
            for kind in sorted(STARTS, reverse=pair % 2 == 1):
                seen[kind].append(round(NUM_REQUESTS * NUM_TOKENS / rollout_s(servers[kind]), 1))
    print(f"decode tokens_per_s={seen}", file=sys.stderr)
    pairs = [ours / theirs for ours, theirs in zip(seen["patched"], seen["stock"], strict=True)]
    ratio = statistics.median(seen["patched"]) / statistics.median(seen["stock"])
    return {
        "decode_tokens_per_s": seen,
        "decode_ratio": round(ratio, 4),
        "decode_ratio_of_pairs": [round(share, 3) for share in statistics.quantiles(pairs, n=4)],
    }


@contextlib.contextmanager
def patched(model: Path, num_ranks: int) -> Iterator[tuple[Server, float]]:
    argv = [sys.executable, "-m", "sglang_patches.serve", *server_flags(model, num_ranks)]
    with started(argv, num_ranks, model.parent / "patched.log") as found:
        yield found


@contextlib.contextmanager
def stock(model: Path, num_ranks: int) -> Iterator[tuple[Server, float]]:
    """SGLang's own command, with the flags and variables of the CPU profile and the CPU rows alone."""
    args = parse(server_flags(model, num_ranks))
    ours = tuple(
        dict.fromkeys(row.target for row in PATCHES if row.device != "cpu" and row.membership == "any")
    )
    config = PluginConfig(device="cpu", left_out=ours)
    path = model.parent / "stock.json"
    path.write_text(plugin_config.dump(config))
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", **os.environ}
    environment |= profile.environment(args, environment)
    environment[CONFIG_ENV] = str(path)
    argv = [sys.executable, "-m", "sglang.launch_server", *profile.fill_flags(args)]
    with started(argv, num_ranks, model.parent / "stock.log", environment) as found:
        yield found


STARTS: dict[str, Callable[[Path, int], Any]] = {"patched": patched, "stock": stock}


@contextlib.contextmanager
def started(
    argv: list[str], num_ranks: int, log: Path, environment: dict[str, str] | None = None
) -> Iterator[tuple[Server, float]]:
    port = free_base_port()
    with ChildProcesses() as children:
        started_s = time.monotonic()
        argv = [*argv, "--host", "127.0.0.1", "--port", str(port)]
        process = children.start("server", argv, log_path=log, env=environment)
        yield Server(url=f"http://127.0.0.1:{port}", num_ranks=num_ranks, process=process), started_s


def wait_first_token(server: Server) -> None:
    server.wait_ready(FIRST_TOKEN_TIMEOUT_S)
    server.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 1, "temperature": 0.0})


# The HTTP driver.


def http_driver(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The example against a static server and against one that releases drained ranks."""
    kinds = {
        "static": [*SHM],
        "drained": [*SHM, "--flexfloor-membership", "elastic", "--flexfloor-release", "drained"],
    }
    taken: dict[str, int] = {}
    outputs: dict[str, Any] = {}
    for kind, flags in kinds.items():
        argv = [sys.executable, "-m", "sglang_patches.serve", *server_flags(model, options.num_ranks), *flags]
        argv += ["--flexfloor-folder", str(model.parent / kind)]
        with started(argv, options.num_ranks, model.parent / f"{kind}.log") as (server, _):
            wait_first_token(server)
            before = iterations(server)
            outputs[kind] = run_example(server, model, options)
            taken[kind] = iterations(server) - before
            print(f"{kind} worker_iterations={taken[kind]}", file=sys.stderr)
    num_tokens = sum(len(tokens) for step in outputs["static"] for tokens in step)
    pairs = zip(*(itertools.chain.from_iterable(outputs[kind]) for kind in kinds), strict=True)
    return {
        "http_driver_response_tokens": num_tokens,
        "http_driver_worker_iterations": taken,
        "http_driver_responses_that_differ": sum(a != b for a, b in pairs),
        "http_driver_tokens_per_worker_iteration_ratio": round(taken["static"] / taken["drained"], 4),
    }


def iterations(server: Server) -> int:
    """Of all ranks; all are there after an update of the weights."""
    rows = server.counters()
    assert len(rows) == server.num_ranks, rows
    return sum(row["num_iterations"] for row in rows)


def run_example(server: Server, model: Path, options: argparse.Namespace) -> list[list[list[int]]]:
    arguments = ["--url", server.url, "--weights", str(model), "--num-steps", str(options.num_steps)]
    with contextlib.redirect_stdout(sys.stderr):
        steps: list[list[list[int]]] = example().main(
            [*arguments, "--num-responses", str(options.num_responses)]
        )
    return steps


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "http_driver", ROOT / "docs" / "examples" / "http_driver.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
