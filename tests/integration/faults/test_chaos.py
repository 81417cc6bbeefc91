"""A few kills in a running job; bench/chaos.py does the same at length."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(3000)]

BENCH = Path(__file__).parents[3] / "bench" / "chaos.py"


def test_a_job_under_fire_comes_to_what_it_would_have_come_to(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCH), "--kills", "4", "--folder", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills_injected"] >= 4
    assert found["recoveries"] >= 1
    for name in ("responses_lost", "responses_duplicated", "wrong_tokens", "hangs"):
        assert found[name] == 0, found
