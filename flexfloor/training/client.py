"""The driver's end of the trainer: synchronous calls with deadlines, no torch and no Megatron-Core."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import zmq

from flexfloor.errors import ChildProcessError, DeadlineExceeded, FlexfloorError
from flexfloor.membership.endpoint import CurveKeys
from flexfloor.training import messages as m
from flexfloor.training.keys import secure_client
from flexfloor.types import TrainSequence

POLL_S = 0.2

Result = TypeVar("Result")


class TrainerError(FlexfloorError):
    """The trainer failed to carry out a command and stays usable; the text ends with its traceback's tail."""


class TrainerRefused(TrainerError, ValueError):
    """The trainer refused a command and changed nothing; the text says why."""


class CallAbandoned(FlexfloorError):
    """The caller no longer wanted the answer; the trainer computes on, and its answer will be dropped."""


class TrainerClient:
    """Commands for one trainer. Not thread-safe: one call at a time, from whichever thread.

    Example:
        client = TrainerClient("ipc:///run/flexfloor/trainer.sock", is_alive=lambda: process.poll() is None)
        client.wait_ready(deadline_s=600)
        stats = client.train_step(sequences)

    Every call raises DeadlineExceeded, ChildProcessError as soon as `is_alive` says that the trainer is gone,
    TrainerRefused or TrainerError.

    Args:
        endpoint: ZeroMQ endpoint that the trainer binds, `ipc://` or `tcp://`.
        is_alive: asked several times a second during a call. It may raise ChildProcessError itself, with the
            trainer's last log lines; returning False raises a bare one. None watches nothing.
        deadline_s: of each call that is not given its own.
        keys: of a trainer that listens on tcp with keys.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        is_alive: Callable[[], bool] | None = None,
        deadline_s: float = 1800.0,
        keys: CurveKeys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._is_alive = is_alive
        self._deadline_s = deadline_s
        self._num_calls = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            secure_client(self._socket, keys)
        self._socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; the trainer runs on."""
        self._socket.close()
        self._context.term()

    def wait_ready(self, deadline_s: float) -> m.TrainerInfo:
        """Wait until the trainer has loaded its weights and answers."""
        return self._call(m.InfoMsg(), m.TrainerInfo, deadline_s)

    def train_step(
        self,
        sequences: Sequence[TrainSequence],
        *,
        learning_rate: float | None = None,
        objective: str = m.Objective.grpo,
        deadline_s: float | None = None,
    ) -> m.TrainStats:
        """Train on a rollout step (`grpo`: `num_minibatches` optimizer steps) or a batch (`nll`: one step).

        Prompt groups should be contiguous in `sequences`. `learning_rate` None takes the configured one.
        """
        message = m.TrainStepMsg(list(sequences), m.Objective(objective), learning_rate)
        return self._call(message, m.TrainStats, deadline_s)

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, deadline_s: float | None = None
    ) -> list[list[float]]:
        """Logprobs of each response token by the current weights, in the order of `sequences`."""
        return self._call(m.LogprobsMsg(list(sequences)), list[list[float]], deadline_s)

    def group_logprobs(
        self,
        groups: Sequence[m.LogprobGroup],
        *,
        weight_version: int,
        needs_reference: bool,
        deadline_s: float | None = None,
        is_wanted: Callable[[], bool] | None = None,
    ) -> m.GroupLogprobs:
        """Old and reference logprobs of complete prompt groups, for a later `train_step` to be given.

        Refused unless `weight_version` is the last one synced and nothing has changed the weights since.

        Args:
            is_wanted: asked several times a second; False gives the call up with CallAbandoned.
        """
        message = m.GroupLogprobsMsg(weight_version, needs_reference, list(groups))
        return self._call(message, m.GroupLogprobs, deadline_s, is_wanted)

    def sync_weights(
        self, weight_version: int, server_url: str, *, deadline_s: float | None = None
    ) -> m.SyncStats:
        """Push the current weights into an SGLang server. Nothing may be running there."""
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        return self._call(m.SyncWeightsMsg(weight_version, server_url, limit_s), m.SyncStats, limit_s + 5.0)

    def weight_checksum(self, *, deadline_s: float | None = None) -> str:
        """Hash of all weights under their Hugging Face names, whatever the parallel layout."""
        return self._call(m.WeightChecksumMsg(), str, deadline_s)

    def save_hf(self, path: str, *, deadline_s: float | None = None) -> None:
        """Write the weights as a Hugging Face checkpoint folder, which must not exist yet or be one."""
        self._call(m.SaveHfMsg(path), type(None), deadline_s)

    def save_checkpoint(self, path: str, *, deadline_s: float | None = None) -> None:
        """Write weights and optimizer state as a Megatron-Core distributed checkpoint."""
        self._call(m.SaveCheckpointMsg(path), type(None), deadline_s)

    def load_checkpoint(self, path: str, *, deadline_s: float | None = None) -> None:
        """Go on from what `save_checkpoint` wrote."""
        self._call(m.LoadCheckpointMsg(path), type(None), deadline_s)

    def shutdown(self, *, deadline_s: float = 30.0) -> None:
        """End the trainer. It answers before its processes exit."""
        self._call(m.ShutdownMsg(), type(None), deadline_s)

    def _call(
        self,
        request: m.Request,
        result: type[Result],
        deadline_s: float | None,
        is_wanted: Callable[[], bool] | None = None,
    ) -> Result:
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        self._num_calls += 1
        call_id = self._num_calls.to_bytes(8, "big")
        body = msgspec.msgpack.encode(request)
        if len(body) > m.MAX_FRAME_BYTES:
            size = (
                f"{type(request).__name__} has {len(body)} bytes, and the trainer takes {m.MAX_FRAME_BYTES}"
            )
            raise TrainerRefused(f"{size}. Fix: fewer or shorter responses in a step")
        self._socket.send_multipart([call_id, body])
        status, body = self._receive(call_id, type(request).__name__, limit_s, is_wanted)
        if status == m.OK:
            return msgspec.msgpack.decode(body, type=result)
        raise _as_exception(msgspec.msgpack.decode(body, type=m.ErrorMsg))

    def _receive(
        self, call_id: bytes, name: str, limit_s: float, is_wanted: Callable[[], bool] | None
    ) -> tuple[bytes, bytes]:
        end_s = time.monotonic() + limit_s
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"{name}: no answer from the trainer at {self.endpoint} in {limit_s:g} s"
                )
            if is_wanted is not None and not is_wanted():
                raise CallAbandoned(f"{name}: given up before the trainer at {self.endpoint} answered")
            if self._socket.poll(int(1000 * min(POLL_S, left_s)) + 1):
                frames = self._socket.recv_multipart()
                if len(frames) == 3 and frames[0] == call_id:
                    return frames[1], frames[2]
            elif self._is_alive is not None and not self._is_alive():
                raise ChildProcessError(f"the trainer at {self.endpoint} ended during {name}")


def _as_exception(error: m.ErrorMsg) -> FlexfloorError:
    if error.is_refusal:
        return TrainerRefused(error.text)
    text = f"{error.text}\n{error.traceback_tail}"
    return ChildProcessError(f"the trainer ends: {text}") if error.is_fatal else TrainerError(text)
