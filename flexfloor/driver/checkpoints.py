"""Checkpoints of a run: what the trainer saves, and beside it what the driver needs to go on from there.

    checkpoints/step-000007/           Megatron-Core's files, state.json, MANIFEST.json
    checkpoints/step-000007.partial/   being written, or left by a run that was killed meanwhile

Rule 1: a folder gets its name only when it is whole and on the disk.
Rule 2: MANIFEST.json names every other file with its size and SHA-256; what does not agree is not loaded.
Rule 3: a damaged checkpoint is passed over for the one before it, and the user is told.
"""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
MANIFEST_FILE = "MANIFEST.json"
STATE_FORMAT_VERSION = 1
_HASH_THREADS = 4
_LEFTOVERS = (".partial", ".removing")


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stood when its trainer was saved."""

    format_version: int = STATE_FORMAT_VERSION
    step: int
    """Steps that are behind it; the number of the next one. The length history is read up to before it."""
    weight_version: int
    """Of the saved weights, as the next step's responses will tell it."""
    weight_checksum: str
    seed: int
    """Of sampling, of the order of prompts, and of the trainer."""
    config_digest: str
    run_id: str
    """Of the run in the length history."""
    pass_index: int
    step_in_pass: int
    windows: dict[str, Any]
    """Look-ahead windows that are not yet used up, by file name; see `scheduling.batch.WindowPlan`."""
    ledger_bytes: int
    """Size of the last step's ledger."""
    saved_at_unix_s: float


class FileDigest(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: Path
    state: RunState


class DamagedCheckpoint(Exception):
    """The text says which file, and what is wrong with it."""


class Checkpoints:
    """Those of one run, in its folder."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, state: RunState, write: Callable[[str], None]) -> Path:
        """`write` fills a folder of the given path, which is then sealed with `state` and its checksums.

        Older checkpoints beyond those to keep are removed. Raises what `write` raises, or OSError.
        """
        path = self._path(state.step)
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(str(partial))
        (partial / STATE_FILE).write_bytes(msgspec.json.encode(state))
        _seal(partial)
        # A damaged one of the same step, that was passed over.
        self._remove(path)
        partial.rename(path)
        _sync_folder(self._folder)
        for old in self._paths()[self._keep :]:
            self._remove(old)
        return path

    def newest(self, on_damage: Callable[[str], None]) -> Checkpoint | None:
        """The newest one that is sound, or None; `on_damage` hears of every newer one that is not."""
        for path in self._paths():
            try:
                return Checkpoint(path=path, state=_verified(path))
            except (DamagedCheckpoint, OSError) as error:
                on_damage(f"{path}: {error}")
        return None

    def clean(self) -> None:
        """Remove what a killed run has left half written or half removed."""
        for path in self._folder.glob("step-*"):
            if path.suffix in _LEFTOVERS:
                logger.info("removing %s, which a run before this one left", path)
                shutil.rmtree(path)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _paths(self) -> list[Path]:
        """Newest first."""
        return sorted((path for path in self._folder.glob("step-*") if not path.suffix), reverse=True)

    def _remove(self, path: Path) -> None:
        if path.exists():
            # Under another name first: half a checkpoint must not look like a whole one.
            doomed = path.with_name(f"{path.name}.removing")
            path.rename(doomed)
            shutil.rmtree(doomed)


def new_state(
    *,
    step: int,
    weight_version: int,
    weight_checksum: str,
    seed: int,
    config_digest: str,
    run_id: str,
    steps_per_pass: int,
    windows: dict[str, Any],
    ledger: Path,
) -> RunState:
    pass_index, step_in_pass = divmod(step, steps_per_pass)
    return RunState(
        step=step,
        weight_version=weight_version,
        weight_checksum=weight_checksum,
        seed=seed,
        config_digest=config_digest,
        run_id=run_id,
        pass_index=pass_index,
        step_in_pass=step_in_pass,
        windows=windows,
        ledger_bytes=ledger.stat().st_size if ledger.exists() else 0,
        saved_at_unix_s=time.time(),
    )


def _seal(folder: Path) -> None:
    """Every file to the disk, and its digest into the manifest."""
    names = _file_names(folder)
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        digests = threads.map(lambda name: _digest(folder / name, is_new=True), names)
        manifest = dict(zip(names, digests, strict=True))
    path = folder / MANIFEST_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    _digest(path, is_new=True)
    _sync_folder(folder)


def _verified(folder: Path) -> RunState:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DamagedCheckpoint(f"has no {MANIFEST_FILE}")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=dict[str, FileDigest])
    except msgspec.DecodeError as error:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} cannot be read: {error}") from error
    if missing := sorted({*manifest, STATE_FILE} - set(_file_names(folder))):
        raise DamagedCheckpoint(f"{missing[0]} is missing")
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        found = threads.map(lambda name: _digest(folder / name), manifest)
        for (name, wanted), digest in zip(manifest.items(), found, strict=True):
            if digest != wanted:
                raise DamagedCheckpoint(
                    f"{name} has {digest.num_bytes} bytes, SHA-256 {digest.sha256[:12]}..., and should have "
                    f"{wanted.num_bytes}, {wanted.sha256[:12]}..."
                )
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=RunState)
    except msgspec.DecodeError as error:
        raise DamagedCheckpoint(f"{STATE_FILE} cannot be read: {error}") from error
    if state.format_version != STATE_FORMAT_VERSION:
        raise DamagedCheckpoint(f"{STATE_FILE} has format {state.format_version}, not {STATE_FORMAT_VERSION}")
    return state


def _file_names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.name != MANIFEST_FILE)


def _digest(path: Path, *, is_new: bool = False) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if is_new:
            os.fsync(file.fileno())
        return FileDigest(os.fstat(file.fileno()).st_size, digest)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
