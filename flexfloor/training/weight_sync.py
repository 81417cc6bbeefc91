"""Pushes the trainer's weights into an SGLang 0.5.23 server over its HTTP interface; runs on trainer rank 0.

    begin_weight_update -> one request per bucket -> end_weight_update

The last bucket's request carries the weight_version, which generated responses then report, and flushes the
prefix cache, whose entries the old weights made. SGLang is never imported: the `tensor` path, whose payload
holds SGLang's own classes, finds its serialiser by entry point.
"""

import logging
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

import requests
from torch import Tensor

from flexfloor.config.schema import Dtype, WeightSyncPath
from flexfloor.errors import FlexfloorError
from flexfloor.training.checksum import WeightChecksum
from flexfloor.training.hf_folder import write_hf_folder
from flexfloor.training.messages import SyncStats
from flexfloor.training.weight_group import WeightGroup

logger = logging.getLogger(__name__)

PAYLOAD_ENTRY_POINT = "flexfloor.weight_payload"
LOAD_FORMAT = "flattened_bucket"

NamedTensors = list[tuple[str, Tensor]]


class WeightSyncError(FlexfloorError):
    """The server did not take the weights; the text names the request and the server's message.

    The server may hold a mixture of old and new weights: push again before anything is generated.
    """


class ServerApi:
    """One server's HTTP interface, with one deadline for everything that is asked of it."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self.url = url.rstrip("/")
        self._end_s = time.monotonic() + deadline_s

    def post(self, route: str, body: dict[str, Any]) -> None:
        """Raises WeightSyncError unless the server answers `success`."""
        answer = self._request("POST", route, json=body)
        try:
            content = answer.json()
            success, message = content["success"], content["message"]
        except (ValueError, KeyError, TypeError):
            success, message = False, answer.text[:2000]
        if not success:
            raise WeightSyncError(f"{self.url}{route} answered {answer.status_code}: {message}")

    def num_ranks(self) -> int:
        """Ranks of the server that each take the weights."""
        answer = self._request("GET", "/server_info")
        if answer.status_code != 200:
            raise WeightSyncError(
                f"{self.url}/server_info answered {answer.status_code}: {answer.text[:500]}"
            )
        return int(answer.json()["tp_size"])

    def left_s(self) -> float:
        """Raises WeightSyncError once the deadline has passed."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise WeightSyncError(f"the weight sync with {self.url} reached its deadline")
        return left_s

    def _request(self, method: str, route: str, **kwargs: Any) -> requests.Response:
        try:
            return requests.request(method, self.url + route, timeout=self.left_s(), **kwargs)
        except requests.RequestException as error:
            raise WeightSyncError(f"{self.url}{route} failed: {error}") from error


class BucketSender(Protocol):
    """Moves one bucket into the server; `labels` are the request's fields that all paths share."""

    def prepare(self, api: ServerApi) -> None: ...

    def send(self, api: ServerApi, bucket: NamedTensors, labels: dict[str, Any]) -> None: ...

    def failed(self, api: ServerApi) -> None: ...


class DistributedSender:
    """Broadcasts buckets over a process group that trainer rank 0 shares with every rank of the server."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._groups: dict[str, WeightGroup] = {}

    def prepare(self, api: ServerApi) -> None:
        if api.url not in self._groups:
            self._groups[api.url] = WeightGroup.join(
                api.url, api.num_ranks(), self._backend, api.left_s(),
                lambda body: api.post("/init_weights_update_group", body),
            )  # fmt: skip

    def send(self, api: ServerApi, bucket: NamedTensors, labels: dict[str, Any]) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._groups[api.url].name,
            **labels,
        }
        self._groups[api.url].broadcast(
            [tensor for _, tensor in bucket], lambda: api.post("/update_weights_from_distributed", body)
        )

    def failed(self, api: ServerApi) -> None:
        # Its ranks may be out of step, or gone with a server that was started anew under the same URL.
        self._groups.pop(api.url, None)


class TensorSender:
    """Hands buckets over by shared memory (CPU) or CUDA IPC; trainer rank 0 and the server share a host."""

    def __init__(self) -> None:
        found = list(entry_points(group=PAYLOAD_ENTRY_POINT))
        if not found:
            raise WeightSyncError(
                f"trainer.weight_sync=tensor needs an entry point of group {PAYLOAD_ENTRY_POINT}, which "
                "comes with the SGLang plugin. Fix: install that for the trainer too, or use distributed"
            )
        self._serialize = found[0].load()
        self._num_ranks: dict[str, int] = {}

    def prepare(self, api: ServerApi) -> None:
        self._num_ranks[api.url] = api.num_ranks()

    def send(self, api: ServerApi, bucket: NamedTensors, labels: dict[str, Any]) -> None:
        payloads = self._serialize(bucket, self._num_ranks[api.url])
        api.post("/update_weights_from_tensor", {"serialized_named_tensors": payloads, **labels})

    def failed(self, api: ServerApi) -> None:
        pass


class WeightPusher:
    """Keeps what outlives one push: process groups, the serialiser, the last folder on disk."""

    def __init__(
        self,
        path: WeightSyncPath,
        *,
        backend: str,
        bucket_bytes: int,
        work_dir: str,
        checkpoint_path: str,
        dtype: Dtype,
    ) -> None:
        self._path = path
        self._bucket_bytes = bucket_bytes
        self._work_dir = Path(work_dir)
        self._checkpoint_path = checkpoint_path
        self._dtype = dtype
        self._backend = backend
        self._sender: BucketSender | None = None

    def push(
        self, weights: Iterator[tuple[str, Tensor]], weight_version: int, server_url: str, deadline_s: float
    ) -> SyncStats:
        """Move all of `weights` into the server. Always runs `weights` to its end: other ranks wait in it.

        Raises:
            WeightSyncError: whatever went wrong on the way to the server or in it.
        """
        started_at_s = time.perf_counter()
        api = ServerApi(server_url, deadline_s)
        tally = _Tally(weights)
        try:
            if self._path is WeightSyncPath.disk:
                self._push_folder(api, tally, weight_version)
            else:
                self._push_buckets(api, tally, weight_version)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"weight sync with {server_url} failed: {error}") from error
        finally:
            for _ in tally:
                pass
        return SyncStats(
            seconds=time.perf_counter() - started_at_s,
            num_bytes=tally.num_bytes,
            weight_checksum=tally.checksum.hexdigest(),
        )

    def _push_buckets(self, api: ServerApi, weights: "_Tally", weight_version: int) -> None:
        if self._sender is None:
            is_tensor = self._path is WeightSyncPath.tensor
            self._sender = TensorSender() if is_tensor else DistributedSender(self._backend)
        try:
            self._sender.prepare(api)
            _begin(api)
            try:
                for bucket, is_last in _buckets(weights, self._bucket_bytes):
                    self._sender.send(api, bucket, _labels(weight_version, is_last))
            finally:
                api.post("/end_weight_update", {})
        except BaseException:
            self._sender.failed(api)
            raise

    def _push_folder(self, api: ServerApi, weights: "_Tally", weight_version: int) -> None:
        folder = self._work_dir / f"weights-{weight_version}"
        write_hf_folder(iter(weights), str(folder), self._checkpoint_path, self._dtype)
        body = {"model_path": str(folder), "weight_version": str(weight_version), "flush_cache": True}
        api.post("/update_weights_from_disk", body)
        for old in self._work_dir.glob("weights-*"):
            if old != folder:
                rmtree(old)


class _Tally:
    """Passes weights through and keeps count of them."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.checksum = WeightChecksum()
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.checksum.add(name, tensor)
            self.num_bytes += tensor.nbytes
            yield name, tensor


def _begin(api: ServerApi) -> None:
    try:
        api.post("/begin_weight_update", {})
    except WeightSyncError as error:
        if "already open" not in str(error):
            raise
        logger.warning("closing a weight update that a trainer before this one left open: %s", error)
        api.post("/end_weight_update", {})
        api.post("/begin_weight_update", {})


def _labels(weight_version: int, is_last: bool) -> dict[str, Any]:
    """The version is told with the last bucket only: until then the weights are a mixture."""
    version = str(weight_version) if is_last else None
    return {"load_format": LOAD_FORMAT, "flush_cache": is_last, "weight_version": version}


def _buckets(weights: "_Tally", bucket_bytes: int) -> Iterator[tuple[NamedTensors, bool]]:
    """(bucket, whether it is the last); at most `bucket_bytes`, but for a tensor that alone exceeds it.

    Within a bucket the widest dtypes come first, so that each tensor is aligned in the flattened whole.
    """
    bucket: NamedTensors = []
    num_bytes = 0
    for name, tensor in weights:
        if bucket and num_bytes + tensor.nbytes > bucket_bytes:
            yield sorted(bucket, key=_width), False
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    yield sorted(bucket, key=_width), True


def _width(named: tuple[str, Tensor]) -> int:
    return -named[1].element_size()
