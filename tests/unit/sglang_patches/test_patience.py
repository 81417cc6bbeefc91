"""Waiting that ends at once when there is something to do."""

import threading
import time

import pytest
import zmq

from sglang_patches.cpu import patience
from sglang_patches.hooks import data_parallel_controller


class Controller:
    """The one attribute of SGLang's controller that the hook touches."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.recv_from_tokenizer = socket


@pytest.fixture
def pair() -> tuple[zmq.Socket[bytes], Controller]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.setsockopt(zmq.LINGER, 0)
        push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        controller = Controller(pull)
        data_parallel_controller.wait_for_requests(controller)
        yield push, controller


def test_an_empty_socket_costs_a_wait_not_a_spin(pair: tuple[zmq.Socket[bytes], Controller]) -> None:
    _, controller = pair
    started_s, cpu_s = time.monotonic(), time.thread_time()
    with pytest.raises(zmq.Again):
        controller.recv_from_tokenizer.recv(flags=zmq.NOBLOCK)
    assert time.monotonic() - started_s >= 0.9 * patience.POLL_MS / 1000
    assert time.thread_time() - cpu_s < 0.5 * patience.POLL_MS / 1000


def test_a_message_ends_the_wait(
    pair: tuple[zmq.Socket[bytes], Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    push, controller = pair
    monkeypatch.setattr(patience, "POLL_MS", 20_000)
    sender = threading.Thread(target=push.send, args=(b"request",))
    started_s = time.monotonic()
    sender.start()
    assert controller.recv_from_tokenizer.recv(flags=zmq.NOBLOCK) == b"request"
    assert time.monotonic() - started_s < 10
    sender.join()


def test_the_rest_of_the_socket_is_untouched(pair: tuple[zmq.Socket[bytes], Controller]) -> None:
    assert pair[1].recv_from_tokenizer.type == zmq.PULL
