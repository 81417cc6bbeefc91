import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexfloor.config.schema import Dtype
from flexfloor.training import hf_folder
from flexfloor.training.hf_folder import HfFolderError, count_parameters, write_hf_folder

WEIGHTS = {f"w{n}": torch.full((4, 8), float(n)) for n in range(5)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_weights_config_and_tokenizer_are_there(source: Path, tmp_path: Path) -> None:
    # A view of another tensor, as exported weights are: safetensors alone would refuse it.
    shared = {**WEIGHTS, "view": WEIGHTS["w1"][:2]}
    num_bytes = write_hf_folder(iter(shared.items()), str(tmp_path / "out"), str(source), Dtype.float32)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == shared.keys()
    assert all(torch.equal(loaded[name], shared[name]) for name in shared)
    assert num_bytes == (5 * 32 + 16) * 4
    assert count_parameters(str(tmp_path / "out")) == 5 * 32 + 16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_shards_and_their_index(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "SHARD_BYTES", 2 * 32 * 4)
    write_hf_folder(iter(WEIGHTS.items()), str(tmp_path / "out"), str(source), Dtype.float32)
    index = json.loads((tmp_path / "out" / hf_folder.INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 5 * 32 * 4
    assert sorted(set(index["weight_map"].values())) == [
        f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], WEIGHTS[name])
    assert count_parameters(str(tmp_path / "out")) == 5 * 32


def test_failure_leaves_nothing_and_still_drains(source: Path, tmp_path: Path) -> None:
    """Other ranks wait in the export: it must be run to its end."""
    taken = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            taken.append(name)
            yield name, tensor

    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("mine")
    with pytest.raises(HfFolderError, match="no checkpoint folder"):
        write_hf_folder(weights(), str(tmp_path / "precious"), str(source), Dtype.float32)
    assert taken == list(WEIGHTS)
    assert (tmp_path / "precious" / "notes.txt").read_text() == "mine"


def test_an_older_folder_is_replaced(source: Path, tmp_path: Path) -> None:
    for weights in (WEIGHTS, {"only": torch.ones(2)}):
        write_hf_folder(iter(weights.items()), str(tmp_path / "out"), str(source), Dtype.float32)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"only"}
