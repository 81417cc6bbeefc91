"""The group of trainer and server, where the server does not want it."""

import subprocess
import sys
import time

import pytest

REFUSED = """
import os, tempfile
import torch.distributed as dist
from flexfloor.training.weight_group import WeightGroup

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

def refuse(body):
    raise RuntimeError(f"no {body['world_size']} today")

try:
    WeightGroup.join("http://127.0.0.1:1", 4, "gloo", 60.0, refuse)
except RuntimeError as error:
    print(error, flush=True)
"""
LIMIT_S = 60.0
"""Far below the deadline of a group, far above the start of Python with torch."""


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_refusal_does_not_wait_for_the_groups_deadline() -> None:
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "no 5 today\n"
    assert time.monotonic() - started_s < LIMIT_S
