"""A trainer on tcp hears only who has its keys."""

import stat
import threading
from pathlib import Path

import pytest

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership.endpoint import CurveKeys
from flexfloor.training import messages as m
from flexfloor.training.client import TrainerClient
from flexfloor.training.command_socket import CommandSocket
from flexfloor.training.keys import read_keys, write_new_keys

pytestmark = pytest.mark.integration

INFO = m.TrainerInfo(num_params=1, num_ranks=1, dp_size=1, context_tokens=1, vocab_size=1, num_steps=0)


def make_keys(folder: Path, name: str = "keys.json") -> CurveKeys:
    write_new_keys(folder / name)
    return read_keys(folder / name)


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Below the test's own folder; CURVE is the same over every transport."""
    return f"ipc://{tmp_path}/trainer.sock"


def test_only_the_keys_holder_is_answered(tmp_path: Path, address: str) -> None:
    keys = make_keys(tmp_path)
    socket = CommandSocket(address, keys)

    def answer_one() -> None:
        reply_to, _, _ = socket.receive()
        socket.answer(reply_to, INFO)

    server = threading.Thread(target=answer_one)
    server.start()
    for stranger in (None, make_keys(tmp_path, "other.json")):
        with TrainerClient(address, keys=stranger) as client, pytest.raises(DeadlineExceeded):
            client.wait_ready(0.5)
    with TrainerClient(address, keys=keys) as client:
        assert client.wait_ready(30.0) == INFO
    server.join(10)
    socket.close()


def test_the_file_is_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = make_keys(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_keys(tmp_path) != first
    assert first.server_secret not in (None, first.client_secret)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="open to others"):
        read_keys(path)
    path.chmod(0o600)
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no keys"):
        read_keys(path)
