"""Rank 0's end of the wire to `TrainerClient`. What is no request is dropped, counted and logged once."""

import logging
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from flexfloor.membership.endpoint import CurveKeys
from flexfloor.membership.messages import BadFrame, BadFrameReason
from flexfloor.training import messages as m
from flexfloor.training.keys import secure_trainer

logger = logging.getLogger(__name__)

TRACEBACK_TAIL_LINES = 15
# How long rank 0 tries to get its last answer out before it exits.
LINGER_MS = 2000
CALL_ID_BYTES = 8


class CommandSocket:
    """Bound for the life of the trainer.

    On a unix socket the folder keeps others out, on tcp the keys do. Raises ValueError for tcp without keys
    and for a folder that others may enter.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        path = Path(urlsplit(endpoint).path) if endpoint.startswith("ipc://") else None
        if path is None and keys is None:
            raise ValueError(
                f"{endpoint}: without keys anybody could command the trainer. Fix: set cluster.trainer_keys"
            )
        self.num_dropped: Counter[str] = Counter()
        """Frames by reason (BadFrameReason)."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # A peer above this loses its connection before the frame is in memory.
        self._socket.maxmsgsize = m.MAX_FRAME_BYTES
        if keys is not None:
            secure_trainer(self._socket, keys)
        if path:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if keys is None and path.parent.stat().st_mode & 0o077:
                raise ValueError(f"{path.parent} is open to others. Fix: chmod 700 {path.parent}")
        self._socket.bind(endpoint)
        if path:
            # Whoever may write to the socket commands the trainer.
            path.chmod(0o600)

    def receive(self) -> tuple[list[bytes], bytes, m.Request]:
        """Block for a request: (address to answer to, its bytes, the request).

        A call that cannot be read is answered as a refusal; frames that are no call are dropped.
        """
        while True:
            client, *frames = self._socket.recv_multipart()
            if len(frames) != 2 or len(frames[0]) != CALL_ID_BYTES:
                sizes = [len(frame) for frame in frames[:4]]
                self._count(BadFrame(BadFrameReason.num_frames, f"{len(frames)} frames of {sizes} bytes"))
                continue
            address, body = [client, frames[0]], frames[1]
            try:
                return address, body, _decode(body)
            except BadFrame as error:
                self._count(error)
                self.answer_error(address, error, is_refusal=True)

    def answer(self, address: list[bytes], result: Any) -> None:
        self._socket.send_multipart([*address, m.OK, msgspec.msgpack.encode(result)])

    def answer_error(
        self, address: list[bytes], error: BaseException, *, is_refusal: bool = False, is_fatal: bool = False
    ) -> None:
        tail = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_TAIL_LINES:]
        text = f"{type(error).__name__}: {error}"
        message = m.ErrorMsg(is_refusal, is_fatal, text, "\n".join(tail))
        self._socket.send_multipart([*address, m.ERROR, msgspec.msgpack.encode(message)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _count(self, error: BadFrame) -> None:
        reason = error.reason.value
        self.num_dropped[reason] += 1
        if self.num_dropped[reason] == 1:
            logger.warning("dropped a frame: %s (more of this kind are counted only)", error)


def _decode(body: bytes) -> m.Request:
    try:
        return msgspec.msgpack.decode(body, type=m.Request)
    except msgspec.ValidationError as error:
        raise BadFrame(BadFrameReason.invalid, str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(BadFrameReason.malformed, str(error)) from error
