import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "sglang"))

from played_server import PlayedServer, play_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PlayedServer]:
    """Four ranks, floor 2, no keys but the token."""
    with play_server(monkeypatch, tmp_path, membership="elastic", floor=2) as server:
        yield server
