"""Random and malformed frames to every socket that FlexFloor opens: no crash, no change, all counted.

    python bench/fuzz_sockets.py [--frames 20000] [--seed 0] [--without-server]

manager    of a real server of 4 ranks, on a unix socket; then its HTTP routes, with an admin key, and its
           port
manager    on tcp with keys, of played ranks in this process
trainer    its socket on unix and on tcp with keys, in a process of its own without Megatron
store      torch's key-value store as a server on tcp hosts it: it has no keys

`num_strangers_answered`: peers without token, keys or the right ones that got an answer. The last line is
JSON.
"""

import argparse
import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path += [
    str(Path(__file__).parents[1] / "tests" / "integration" / room)
    for room in ("", "sglang", "elastic", "membership", "safety")
]

import requests
from fleet import Fleet
from fuzz import FuzzResult, fuzz_http, fuzz_manager, fuzz_store, fuzz_trainer, http_call
from rollouts import Request, generate
from server import Server, start_server
from sharp_model import sharp_tiny_moe

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses
from flexfloor.rollout.ports import free_base_port
from flexfloor.training.keys import read_keys, write_new_keys
from sglang_patches.elastic import group_store

ADMIN_KEY = "an-admin-key-of-this-run"
PLAYED_TRAINER = Path(__file__).parents[1] / "tests" / "integration" / "safety" / "played_trainer.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--frames", type=int, default=20_000, help="per ZeroMQ socket; a tenth over HTTP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-server", action="store_true", help="leave the real server out")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder, ChildProcesses() as children:
        root = Path(folder)
        results += manager_on_tcp(options.frames, options.seed)
        results += trainer(children, root, options.frames, options.seed)
        results += store(root, options.frames // 20, options.seed)
        masked = None
        if not options.without_server:
            found, masked = real_server(children, root, options.frames, options.seed)
            results += found
    for result in results:
        print(json.dumps(result.figures()), file=sys.stderr)
    print(json.dumps(figures(results, masked, options)))


def manager_on_tcp(num_frames: int, seed: int) -> list[FuzzResult]:
    endpoint = Endpoint.tcp("127.0.0.1", free_base_port())
    with Fleet(endpoint) as fleet:
        manager = fleet.manager
        return [
            fuzz_manager(
                "manager tcp",
                endpoint,
                num_frames=num_frames,
                seed=seed,
                dropped=lambda: manager.num_dropped,
                status=manager.status,
            )
        ]


def trainer(children: ChildProcesses, root: Path, num_frames: int, seed: int) -> list[FuzzResult]:
    write_new_keys(root / "keys.json")
    results = []
    for name, address, arguments in (
        ("trainer unix", f"ipc://{root}/t/trainer.sock", []),
        ("trainer tcp", f"tcp://127.0.0.1:{free_base_port()}", [str(root / "keys.json")]),
    ):
        keys = read_keys(root / "keys.json") if arguments else None
        argv = [sys.executable, str(PLAYED_TRAINER), address, *arguments]
        child = children.start(name, argv, log_path=root / "trainer.log")
        results.append(fuzz_trainer(name, address, keys, num_frames=num_frames, seed=seed))
        results[-1].crashed |= not child.is_alive()
    return results


def store(root: Path, num_raw: int, seed: int) -> list[FuzzResult]:
    endpoint = Endpoint.tcp("127.0.0.1", free_base_port())
    kept = group_store.host(endpoint)
    member = group_store.connect(endpoint, root, 20.0)
    member.set("a", "1")

    def works() -> bool:
        other = group_store.connect(endpoint, root, 20.0)
        other.wait(["a"], timedelta(seconds=20))
        return kept is not None and bool(other.get("a") == b"1")

    host, _, port = endpoint.address.rpartition(":")
    return [fuzz_store("store", f"{host}:{int(port) + 1}", works, num_raw=num_raw, seed=seed)]


def real_server(
    children: ChildProcesses, root: Path, num_frames: int, seed: int
) -> tuple[list[FuzzResult], bool]:
    """The results, and whether the admin key stayed out of the server's log."""
    flags = ["--flexfloor-membership", "elastic", "--flexfloor-folder", str(root / "m")]
    flags += ["--flexfloor-collectives", "shm", "--admin-api-key", ADMIN_KEY]
    server = start_server(children, sharp_tiny_moe(root / "model"), 4, root / "server.log", flags)
    server.wait_ready()
    request = Request(prompt=(5, 6, 7), num_tokens=16, dp_rank=1)
    before, endpoint = generate(server, request), Endpoint.read(root / "m")
    with DriverClient(endpoint, timeout_s=120) as client:
        results = [
            fuzz_manager(
                "manager unix, real server",
                endpoint,
                num_frames=num_frames,
                seed=seed,
                dropped=lambda: dropped_of(server),
                status=client.status,
            ),
            fuzz_http(
                "http, real server",
                http_call(server.url),
                ADMIN_KEY,
                num_requests=num_frames // 10,
                seed=seed,
                status=lambda: (client.status().membership_epoch, client.status().members),
            ),
            fuzz_store("http port, real server", server.url.removeprefix("http://"), server.is_ready,
                       num_raw=num_frames // 20, seed=seed),
        ]  # fmt: skip
        for result in results:
            result.crashed |= generate(server, request).tokens != before.tokens or not client.release([3]).ok
            result.crashed |= not client.rejoin().ok
    assert server.process is not None
    server.process.check()
    return results, ADMIN_KEY not in (root / "server.log").read_text(errors="replace")


def dropped_of(server: Server) -> dict[str, int]:
    """As the server counts them."""
    shown: dict[str, int] = requests.get(f"{server.url}/flexfloor/membership", timeout=60).json()[
        "num_dropped"
    ]
    return shown


def figures(
    results: list[FuzzResult], key_masked: bool | None, options: argparse.Namespace
) -> dict[str, Any]:
    def count(name: str) -> int:
        return sum(int(getattr(result, name)) for result in results)

    return {
        "bench": "fuzz_sockets",
        "seed": options.seed,
        "sockets": [result.socket for result in results],
        "num_frames": count("num_frames"),
        "num_raw_connections": count("num_raw"),
        "num_dropped_or_refused": sum(sum(result.num_dropped.values()) for result in results),
        "crashes": count("crashed"),
        "state_changes": count("state_changed"),
        "strangers_answered": count("num_strangers_answered"),
        "admin_key_in_server_log": None if key_masked is None else not key_masked,
    }


if __name__ == "__main__":
    main()
