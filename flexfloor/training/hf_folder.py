"""Writes a Hugging Face checkpoint folder from exported weights. No Megatron-Core."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flexfloor.config.schema import Dtype
from flexfloor.errors import FlexfloorError

SHARD_BYTES = 4 * 1024**3
INDEX_NAME = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class HfFolderError(FlexfloorError):
    """A Hugging Face checkpoint folder that could not be written; nothing appears under its name."""


def write_hf_folder(
    weights: Iterator[tuple[str, torch.Tensor]], path: str, source_path: str, dtype: Dtype
) -> int:
    """Write `weights` and the configuration and tokenizer files of `source_path` as folder `path`.

    The folder appears under its name only when it is complete; one that is there already is replaced.
    `weights` is always run to its end, even when writing fails: other ranks may be waiting in it.

    Returns: bytes of weights written.

    Raises:
        HfFolderError: the folder could not be written, or `path` is something else than a checkpoint folder.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        _check_target(target)
        # One writer a target: others' are of processes that were killed.
        for left in target.parent.glob(f"{target.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        num_bytes = _write_shards(weights, partial)
        _copy_companions(Path(source_path), partial, dtype)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise HfFolderError(f"{path} could not be written: {error}") from error
    finally:
        for _ in weights:
            pass
    return num_bytes


def _check_target(target: Path) -> None:
    """Replacing deletes: only what looks like our own work may go."""
    if target.exists() and not (target / "config.json").is_file():
        raise FileExistsError("it exists and is no checkpoint folder")


def count_parameters(path: str) -> int:
    """Elements of all tensors in a checkpoint folder, read from the files' headers."""
    total = 0
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                total += int(torch.Size(tensors.get_slice(name).get_shape()).numel())
    return total


def _write_shards(weights: Iterator[tuple[str, torch.Tensor]], folder: Path) -> int:
    """One file per SHARD_BYTES, numbered as transformers does, and their index."""
    files: list[Path] = []
    weight_map: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    total_bytes = shard_bytes = 0

    def flush() -> None:
        files.append(folder / f"part-{len(files):05d}.safetensors")
        save_file(shard, files[-1], metadata={"format": "pt"})
        shard.clear()

    for name, tensor in weights:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
            shard_bytes = 0
        # A copy of its own: exported tensors may be views of one another, which safetensors refuses.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        weight_map[name] = len(files)
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    _name_shards(files, weight_map, total_bytes, folder)
    return total_bytes


def _name_shards(files: list[Path], weight_map: dict[str, int], total_bytes: int, folder: Path) -> None:
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for file, name in zip(files, names, strict=True):
        file.rename(folder / name)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {weight: names[number] for weight, number in weight_map.items()},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))


def _copy_companions(source: Path, folder: Path, dtype: Dtype) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    # The weights are written as trained, whatever the source's dtype; both spellings are in use.
    config.update({key: dtype.value for key in ("dtype", "torch_dtype") if key in config})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
