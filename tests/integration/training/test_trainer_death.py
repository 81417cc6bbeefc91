"""A trainer that loses a rank ends, and says so soon."""

import time
from pathlib import Path

import psutil
import pytest
from tiny_qwen import make_sequences, running_trainer

from flexfloor.errors import ChildProcessError

pytestmark = pytest.mark.integration

DETECTION_LIMIT_S = 15.0


def test_killed_rank_is_reported_within_seconds(hf_checkpoint: Path, tmp_path: Path) -> None:
    with running_trainer(tmp_path, hf_checkpoint) as trainer:
        ranks = psutil.Process(trainer.process.pid).children()
        victim = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
        victim.kill()
        killed_at_s = time.monotonic()
        with pytest.raises(ChildProcessError, match="rank"):
            trainer.client.train_step(make_sequences(8), deadline_s=DETECTION_LIMIT_S)
        assert time.monotonic() - killed_at_s < DETECTION_LIMIT_S
        assert not any(rank.is_running() for rank in ranks)
