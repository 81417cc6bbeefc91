from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flexfloor.config.schema import Dtype, WeightSyncPath
from flexfloor.training import weight_sync
from flexfloor.training.weight_sync import WeightPusher, WeightSyncError, _buckets, _Tally

WEIGHTS = [("a", torch.zeros(10)), ("b", torch.zeros(5)), ("c", torch.zeros(30)), ("d", torch.zeros(1))]


def test_buckets_by_hand() -> None:
    found = [
        ([name for name, _ in bucket], is_last) for bucket, is_last in _buckets(_Tally(iter(WEIGHTS)), 60)
    ]
    assert found == [(["a", "b"], False), (["c"], False), (["d"], True)]


def test_wide_dtypes_come_first_so_that_all_are_aligned() -> None:
    mixed = [("half", torch.zeros(3, dtype=torch.bfloat16)), ("bias", torch.zeros(2)), ("x", torch.zeros(2))]
    [(bucket, is_last)] = _buckets(_Tally(iter(mixed)), 1000)
    assert [name for name, _ in bucket] == ["bias", "x", "half"]
    assert is_last


def test_failed_push_names_the_server_and_drains_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    posted = []

    def refuse(self: Any, route: str, body: dict[str, Any]) -> None:
        posted.append(route)
        if route == "/update_weights_from_disk":
            raise WeightSyncError("http://s/update_weights_from_disk answered 400: no such model")

    taken = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS:
            taken.append(name)
            yield name, tensor

    monkeypatch.setattr(weight_sync.ServerApi, "post", refuse)
    monkeypatch.setattr(weight_sync, "write_hf_folder", lambda *args: 0)
    pusher = WeightPusher(
        WeightSyncPath.disk,
        backend="gloo",
        bucket_bytes=1,
        work_dir="/w",
        checkpoint_path="/c",
        dtype=Dtype.float32,
    )
    with pytest.raises(WeightSyncError, match="no such model"):
        pusher.push(weights(), 3, "http://s", 5.0)
    assert taken == ["a", "b", "c", "d"]
    assert posted == ["/update_weights_from_disk"]
