"""Temporary folders and shared memory that killed processes leave behind, and their removal.

A folder of ours holds a file that its owner locks for life. The kernel drops the lock however the owner ends,
so whoever gets the lock of another folder knows that nobody uses it. Shared memory has no such mark: what a
server of ours shares is written down in the folder, and goes with it. Of servers without a folder what SGLang
names itself is removed, when the process in the name is gone, or when nobody has mapped it for a while.
"""

import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = "owner.lock"
NOTE_NAME = "shared_memory.txt"
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.1
UNMAPPED_S = 600.0
"""A file of shared memory may be made a moment before anybody maps it."""

_PREFIX = "flexfloor-"
# SGLang's names: with the pid of its maker, or with a number of the server that nothing else tells.
_OF_PID = re.compile(r"sgl_shm_\w+_(\d+)_[0-9a-f]+|multi_tokenizer_args_(\d+)")
_NAMELESS = re.compile(r"sglang_loads_[\w.-]+\.shm")
_OF_SERVER = re.compile(rf"{_OF_PID.pattern}|{_NAMELESS.pattern}|sem\.mp-\w+|psm_\w+|torch_\w+")


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder with a short path that only this user can enter, removed at the end.

    Those that killed processes have left are removed first.
    """
    remove_left_folders(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        lock = hold(Path(name))
        try:
            yield Path(name)
        finally:
            _remove_noted(Path(name))
            os.close(lock)


def note_shared_memory(folder: Path, pids: Iterable[int]) -> None:
    """Write down in a private folder what these processes share: it is to go with the folder, by number."""
    found = server_files(pids) - server_files([os.getpid()])
    lines = [f"{_number(path)} {path}\n" for path in sorted(found)]
    with (folder / NOTE_NAME).open("a", encoding="utf-8") as file:
        file.writelines(lines)


def hold(folder: Path, *, through_exec: bool = False, timeout_s: float = 0.0) -> int:
    """Mark the folder as used by this process; closing the descriptor, or ending, gives it up.

    Raises BlockingIOError where another process still holds it after `timeout_s`.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return _hold(folder, through_exec)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(POLL_S)


def _hold(folder: Path, through_exec: bool) -> int:
    path, fresh = folder / LOCK_NAME, folder / f"{LOCK_NAME}.{os.getpid()}"
    is_new = not path.exists()
    # A new one gets its name once it is locked: nobody finds it free.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(fresh if is_new else path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_new:
            _name(fresh, path)
    except OSError:
        os.close(descriptor)
        raise
    os.set_inheritable(descriptor, through_exec)
    return descriptor


def _name(fresh: Path, path: Path) -> None:
    """Unlike a rename, this never takes the place of one that another process has just named."""
    try:
        path.hardlink_to(fresh)
    except FileExistsError as error:
        raise BlockingIOError(f"{path} was made by another process meanwhile") from error
    finally:
        fresh.unlink()


def remove_left_folders(parent: Path, prefix: str = _PREFIX) -> list[Path]:
    """Remove this user's folders there that a dead process held; returns them."""
    removed = []
    for folder in sorted(parent.glob(f"{prefix}*")):
        with suppress(OSError):
            if _is_left(folder):
                _remove_noted(folder)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    if removed:
        logger.info("removed left-overs of killed processes: %s", ", ".join(map(str, removed)))
    return removed


def remove_left_shared_memory(folder: Path = SHARED_MEMORY, *, unmapped_s: float = UNMAPPED_S) -> list[Path]:
    """Remove what dead servers of this user have left; returns it."""
    names = [
        path
        for path in _files_of_user(folder)
        if _OF_PID.fullmatch(path.name) or _NAMELESS.fullmatch(path.name)
    ]
    mapped = mapped_files(_pids(), folder) if names else set()
    removed = []
    for path in names:
        # Several servers may start at once, each removing, and others end meanwhile.
        with suppress(FileNotFoundError):
            if path not in mapped and _is_unused(path, unmapped_s):
                path.unlink()
                removed.append(path)
    if removed:
        logger.info("removed %d files of shared memory of dead servers in %s", len(removed), folder)
    return removed


def mapped_files(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> set[Path]:
    """Files of the folder that these processes have mapped; processes that are gone or foreign have none."""
    # By number, not by name: a semaphore gets its last name after it was mapped.
    mapped = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                _, _, _, device, inode, *_ = line.split(maxsplit=5)
                mapped.add((device, int(inode)))
    return {path for path in _files_of_user(folder) if _number(path) in mapped}


def server_files(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> set[Path]:
    """Of what these processes have mapped: what SGLang, torch and Python make under names of their own."""
    return {path for path in mapped_files(pids, folder) if _OF_SERVER.fullmatch(path.name)}


def remove(paths: Iterable[Path]) -> None:
    """Of this user only; what is gone already is no error."""
    for path in paths:
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()


def _remove_noted(folder: Path) -> None:
    with suppress(FileNotFoundError):
        for line in (folder / NOTE_NAME).read_text(encoding="utf-8").splitlines():
            number, _, name = line.rpartition(" ")
            # A name may have been taken again by somebody else.
            if str(_number(Path(name))) == number:
                remove([Path(name)])


def _is_left(folder: Path) -> bool:
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or not (folder / LOCK_NAME).exists():
        return False
    try:
        os.close(hold(folder))
    except BlockingIOError:
        return False
    return True


def _is_unused(path: Path, unmapped_s: float) -> bool:
    found = _OF_PID.fullmatch(path.name)
    if found is not None:
        return not Path("/proc", found[1] or found[2]).exists()
    # The clock of the file system is the wall clock.
    return time.time() - path.stat().st_ctime > unmapped_s


def _files_of_user(folder: Path) -> list[Path]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in paths if _is_of_user(path)]


def _is_of_user(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _number(path: Path) -> tuple[str, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", found.st_ino


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
