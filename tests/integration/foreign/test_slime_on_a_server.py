"""slime's loop, our functions and a real server whose drained ranks leave during the rollout."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from foreign_engine import FakeEngine, serving
from server import Server, start_server

from flexfloor.integrations import slime_rollout
from flexfloor.processes import ChildProcesses

# `full`: it needs a server of its own, and tests/integration/serve has one whose drained ranks leave as well.
pytestmark = [pytest.mark.integration, pytest.mark.late, pytest.mark.full, pytest.mark.timeout(900)]

STAND_IN = Path(__file__).parents[2] / "contracts" / "stand_in"
FLAGS = (
    *("--flexfloor-membership", "elastic", "--flexfloor-collectives", "shm"),
    *("--flexfloor-release", "drained"),
)
CAP_TOKENS = 200
PROMPT = [5, 7, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slime")


@pytest.fixture(scope="module")
def server(shared_checkpoint: Path, folder: Path) -> Iterator[Server]:
    flags = [*FLAGS, "--flexfloor-folder", str(folder / "m")]
    with ChildProcesses() as children:
        yield start_server(children, shared_checkpoint, 4, folder / "server.log", flags).wait_ready()


class OneLong:
    """Four groups of one sample. Three have most of their tokens from an earlier step, and end soon."""

    epoch_id = 0

    def __init__(self) -> None:
        self.num_given = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        from slime.utils.types import Sample

        groups = []
        for index in range(self.num_given, self.num_given + num_samples):
            sample = Sample(index=index, prompt=f"p{index}", label="x", tokens=[*PROMPT, 4 + index])
            if index:
                done = [6] * (CAP_TOKENS - 2)
                sample.append_response_tokens(tokens=done, log_probs=[0.0] * len(done))
            groups.append([sample])
        self.num_given += num_samples
        return groups


def test_ranks_leave_during_the_rollout_and_are_back_for_the_update(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(slime_rollout, "_lengths", None)
    before = membership(server)
    with serving(FakeEngine(workers=(server.url,))) as router:
        args = Namespace(
            sglang_router_ip="127.0.0.1",
            sglang_router_port=router.port,
            custom_generate_function_path="flexfloor.integrations.slime_rollout.generate",
            rollout_batch_size=4,
            over_sampling_batch_size=4,
            rollout_max_response_len=CAP_TOKENS,
            use_rollout_routing_replay=False,
            drop_group=lambda group: False,
            flexfloor_folder=str(folder / "m"),
        )
        from slime.rollout import sglang_rollout

        # Lengths are chosen, not drawn: the model has random weights.
        sglang_rollout.GenerateState(args).sampling_params["ignore_eos"] = True
        output = slime_rollout.generate_rollout(args, 0, OneLong())
        forget_slime()
    assert [group[0].response_length for group in output.samples] == [CAP_TOKENS] * 4
    assert [group[0].status.value for group in output.samples] == ["truncated"] * 4
    assert all(len(group[0].rollout_log_probs) == CAP_TOKENS for group in output.samples)
    assert router.asked == [], "placed responses go to the server itself"
    figures = output.metrics
    assert figures["flexfloor/num_releases"] >= 1
    assert figures["flexfloor/response_tokens"] >= CAP_TOKENS
    assert figures["flexfloor/occupied_worker_s"] < figures["flexfloor/static_occupied_worker_s"]
    after = membership(server)
    assert after["members"] == after["routed"] == [0, 1, 2, 3]
    assert after["membership_epoch"] >= before["membership_epoch"] + 2


def membership(server: Server) -> Any:
    reply = requests.get(f"{server.url}/flexfloor/membership", timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def forget_slime() -> None:
    for name in [name for name in sys.modules if name == "slime" or name.startswith("slime.")]:
        del sys.modules[name]
