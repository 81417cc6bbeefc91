"""A server over several nodes: what a command line must say, and what the nodes leave for each other."""

from pathlib import Path

import pytest

from flexfloor.membership.endpoint import Endpoint
from sglang_patches import nodes, serve
from sglang_patches.serve_args import ServeArgs, parse

GROUP = ["--tp-size", "4", "--ep-size", "4", "--dp-size", "4", "--enable-dp-attention", "--enable-dp-lm-head"]
ELASTIC = ["--device", "cpu", *GROUP, "--moe-dense-tp-size", "1", "--flexfloor-membership", "elastic"]
BIND = ["--flexfloor-bind", "tcp://node1:28600", "--flexfloor-folder", "m"]
MEETING = ["--dist-init-addr", "node1:28500"]


def args_of(node_rank: int, *flags: str) -> ServeArgs:
    return parse([*ELASTIC, *BIND, *MEETING, "--nnodes", "2", "--node-rank", str(node_rank), *flags])


def test_each_node_has_its_share_of_the_ranks() -> None:
    args = args_of(1)
    assert (args.num_ranks, args.num_local_ranks, args.num_nodes, args.node_rank) == (4, 2, 2, 1)
    assert args.bind == "tcp://node1:28600"
    assert parse(ELASTIC).num_local_ranks == 4


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            [*MEETING, "--nnodes=2"],
            "must reach the manager on node 0. Fix: add --flexfloor-bind tcp://NODE0:PORT",
        ),
        ([*BIND[:2], *MEETING, "--nnodes=2"], "--flexfloor-folder=not given: node 0 leaves the keys there"),
        ([*BIND, "--nnodes=2"], "--dist-init-addr=not given: --nnodes 2 must meet somewhere"),
        (
            [*BIND, *MEETING, "--nnodes=2", "--node-rank=2"],
            "--node-rank=2: there are 2 nodes. Fix: take",
        ),
        ([*BIND, *MEETING, "--nnodes=2", "--node-rank=-1"], "--node-rank=-1: not a node's number"),
        ([*BIND, *MEETING, "--nnodes=3"], "--nnodes=3: 4 ranks cannot be shared out evenly"),
        (
            ["--flexfloor-bind", "ipc:///m"],
            "neither unix nor tcp://HOST:PORT. Fix: give unix, or tcp://NODE0:PORT",
        ),
        (["--flexfloor-bind", "tcp://node1"], "the port must be a number of 1 to 65534"),
        (["--flexfloor-bind", "tcp://node1:0"], "the port must be a number of 1 to 65534"),
        (["--flexfloor-bind", "tcp://node1:65535"], "the port must be a number of 1 to 65534"),
        (["--flexfloor-bind", "tcp://0.0.0.0:5000"], "it must name node 0"),
        (["--flexfloor-bind", "tcp://node1:28505", *MEETING], "SGLang takes port 28505 for --dist-init-addr"),
        (["--flexfloor-bind", "tcp://node1:28512", *MEETING], "SGLang takes port 28513 for --dist-init-addr"),
    ],
)
def test_refusals_name_flag_value_and_fix(flags: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as refused:
        parse([*ELASTIC, *flags])
    assert text in str(refused.value)


def test_the_first_node_leaves_the_endpoint_that_the_others_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder = str(tmp_path / "m")
    first = args_of(0, "--flexfloor-folder", folder)
    assert serve.prepare_folder(first) == folder
    endpoint = Endpoint.read(folder)
    assert endpoint.address == "tcp://node1:28600"
    assert endpoint.launch == "dist_init_addr=node1:28500 nnodes=2 slurm_job=17"
    serve.prepare_folder(args_of(1, "--flexfloor-folder", folder))
    assert Endpoint.read(folder) == endpoint
    serve.prepare_folder(first)
    assert Endpoint.read(folder).fingerprint != endpoint.fingerprint


def test_a_node_that_finds_another_jobs_server_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "ENDPOINT_TIMEOUT_S", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder = str(tmp_path / "m")
    serve.prepare_folder(args_of(0, "--flexfloor-folder", folder))
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with pytest.raises(SystemExit, match="of launch 'dist_init_addr=node1:28500 nnodes=2 slurm_job=17'"):
        serve.prepare_folder(args_of(1, "--flexfloor-folder", folder))
