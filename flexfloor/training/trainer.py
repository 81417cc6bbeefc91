"""A rank process of the trainer: `torchrun ... -m flexfloor.training.trainer --spec FILE`.

Rank 0 takes commands from a `TrainerClient`, checks them, and broadcasts them; then all ranks carry them out
in step. A command that fails where all ranks are still in step is reported and forgotten. Anything else ends
the process, whereupon torchrun ends the others.
"""

import argparse
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from flexfloor.config.schema import Device
from flexfloor.errors import FlexfloorError
from flexfloor.training import messages as m
from flexfloor.training.command_socket import CommandSocket
from flexfloor.training.keys import read_keys
from flexfloor.training.launch import TrainerSpec, decode_spec
from flexfloor.training.packing import SequenceError
from flexfloor.training.weight_sync import WeightPusher

if TYPE_CHECKING:
    from flexfloor.training.megatron.engine import TrainerEngine

logger = logging.getLogger(__name__)


class RankLoop:
    """Carries out commands on one rank."""

    def __init__(self, spec: TrainerSpec, engine: "TrainerEngine") -> None:
        self._spec = spec
        self._engine = engine
        self._weight_version: int | None = None
        """Last synced; None where the weights have changed since."""
        self._pusher = WeightPusher(
            spec.trainer.weight_sync,
            backend="gloo" if spec.device is Device.cpu else "nccl",
            bucket_bytes=spec.trainer.weight_bucket_bytes,
            work_dir=spec.work_dir,
            checkpoint_path=spec.checkpoint_path,
            dtype=spec.dtype,
        )

    def lead(self) -> None:
        """Rank 0, until it is told to shut down."""
        keys = None if self._spec.keys_path is None else read_keys(Path(self._spec.keys_path))
        socket = CommandSocket(self._spec.endpoint, keys)
        logger.info("endpoint=%s ready", self._spec.endpoint)
        try:
            while self._lead_one(socket):
                pass
        finally:
            socket.close()

    def follow(self) -> None:
        """Every other rank."""
        while True:
            request = msgspec.msgpack.decode(self._broadcast(None), type=m.Request)
            if isinstance(request, m.ShutdownMsg):
                return
            # Only rank 0 does what may fail and be forgotten; an error here leaves the ranks out of step.
            self._run(request)

    def _lead_one(self, socket: CommandSocket) -> bool:
        address, body, request = socket.receive()
        try:
            self._refuse_early(request)
        except ValueError as error:
            socket.answer_error(address, error, is_refusal=True)
            return True
        if isinstance(request, m.InfoMsg):
            socket.answer(address, self._engine.info())
            return True
        self._broadcast(body)
        if isinstance(request, m.ShutdownMsg):
            socket.answer(address, None)
            return False
        self._lead_command(socket, address, request)
        return True

    def _lead_command(self, socket: CommandSocket, address: list[bytes], request: m.Request) -> None:
        started_at_s = time.perf_counter()
        try:
            result, error = self._run_in_step(request)
        except BaseException as fatal:
            socket.answer_error(address, fatal, is_fatal=True)
            raise
        if error is None:
            socket.answer(address, result)
        else:
            logger.warning("%s failed: %s", type(request).__name__, error)
            socket.answer_error(address, error)
        logger.debug("%s took_s=%.3f", type(request).__name__, time.perf_counter() - started_at_s)

    def _refuse_early(self, request: m.Request) -> None:
        """Raises ValueError for a request that no rank needs to hear of."""
        if isinstance(request, m.TrainStepMsg):
            is_grpo = request.objective is m.Objective.grpo
            self._engine.check(request.sequences, needs_logprobs=is_grpo)
            if is_grpo:
                self._engine.check_given(request.sequences, self._weight_version)
        elif isinstance(request, m.LogprobsMsg):
            self._engine.check(request.sequences, needs_logprobs=False)
        elif isinstance(request, m.GroupLogprobsMsg):
            self._engine.check_groups(request, self._weight_version)
        elif isinstance(request, m.LoadCheckpointMsg) and not Path(request.path, "metadata.json").is_file():
            raise SequenceError(f"{request.path} holds no distributed checkpoint")

    def _run_in_step(self, request: m.Request) -> tuple[Any, FlexfloorError | None]:
        """Returns (result, error). Errors after which all ranks are in step are returned, others raised."""
        try:
            return self._run(request), None
        except FlexfloorError as error:
            return None, error

    def _run(self, request: m.Request) -> Any:
        match request:
            case m.TrainStepMsg(sequences, objective, learning_rate):
                self._weight_version = None
                return self._engine.train_step(sequences, objective, learning_rate)
            case m.LogprobsMsg(sequences):
                return self._engine.logprobs(sequences)
            case m.GroupLogprobsMsg(version, needs_reference, groups):
                return self._engine.group_logprobs(
                    groups, weight_version=version, needs_reference=needs_reference
                )
            case m.SyncWeightsMsg():
                result = self._sync_weights(request)
                self._weight_version = request.weight_version
                return result
            case m.WeightChecksumMsg():
                return self._engine.weight_checksum()
            case m.SaveHfMsg(path):
                return self._engine.save_hf(path)
            case m.SaveCheckpointMsg(path):
                return self._engine.save_checkpoint(path)
            case m.LoadCheckpointMsg(path):
                self._weight_version = None
                return self._engine.load_checkpoint(path)
        raise AssertionError(f"unhandled request {request}")

    def _sync_weights(self, request: m.SyncWeightsMsg) -> m.SyncStats | None:
        weights = self._engine.export()
        if dist.get_rank() == 0:
            return self._pusher.push(weights, request.weight_version, request.server_url, request.deadline_s)
        for _ in weights:
            pass
        return None

    def _broadcast(self, body: bytes | None) -> bytes:
        """Rank 0 gives, all get. Waits as long as it takes: between commands lies a whole rollout."""
        group = self._engine.control_group
        size = torch.tensor([len(body or b"")])
        dist.broadcast(size, src=0, group=group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if body is not None:
            data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=group)
        return body if body is not None else data.numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, help="file with the trainer's spec, as the driver writes it")
    # Megatron-Core tells its whole configuration at level INFO, on every rank.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    spec = decode_spec(Path(parser.parse_args().spec).read_bytes())
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s trainer_rank={rank} %(name)s %(message)s")
    if spec.device is Device.cpu:
        torch.set_num_threads(1)
        from flexfloor.training.megatron.cpu.install import install

        install()
    from flexfloor.training.megatron.engine import TrainerEngine

    loop = RankLoop(spec, TrainerEngine(spec))
    loop.lead() if rank == 0 else loop.follow()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
