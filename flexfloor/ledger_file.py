"""The file format of a ledger: frames of msgpack records, whole or torn. PURE.

Format: the 8 bytes `FFLEDGR1`, then frames. A frame is `length, crc32(length), crc32(payload)` as three
little-endian uint32, then `length` bytes of payload: one msgpack record of `flexfloor.records`. The length
has its own checksum so that a flipped bit in it is not mistaken for the end of the file.

Torn tail: a crash may cut the last frame anywhere, or leave zeros after it. Reading stops cleanly before it.
Any other damage raises LedgerError.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from flexfloor.errors import LedgerError

MAGIC = b"FFLEDGR1"
_HEADER = struct.Struct("<III")
_LENGTH = struct.Struct("<I")


def step_path(folder: Path, rollout_step: int) -> Path:
    """File of a step's ledger in its folder."""
    return folder / f"step-{rollout_step:06d}.ledger"


def framed(payload: bytes) -> bytes:
    length = _LENGTH.pack(len(payload))
    return _HEADER.pack(len(payload), crc32(length), crc32(payload)) + payload


def frames(data: bytes, path: Path) -> Iterator[tuple[int, bytes]]:
    """Every whole frame of a ledger's bytes: where it ends in the file, and its payload.

    Nothing for a file that ends inside its first 8 bytes. `path` is for errors: LedgerError for a file that
    is no ledger, and for damage before the tail.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return
        raise LedgerError(f"{path} is not a ledger: it begins with {data[: len(MAGIC)]!r}")
    offset = len(MAGIC)
    while (payload := _frame_at(data, offset, path)) is not None:
        offset += _HEADER.size + len(payload)
        yield offset, payload


def _frame_at(data: bytes, offset: int, path: Path) -> bytes | None:
    """The payload of the frame at `offset`; None at the end of the file or of its whole frames."""
    if len(data) - offset < _HEADER.size:
        return None
    length, length_crc, payload_crc = _HEADER.unpack_from(data, offset)
    if crc32(data[offset : offset + _LENGTH.size]) != length_crc:
        _refuse_unless_torn(data, offset + _HEADER.size, path, "length")
        return None
    end = offset + _HEADER.size + length
    if end > len(data):
        return None
    payload = data[offset + _HEADER.size : end]
    if crc32(payload) == payload_crc:
        return payload
    _refuse_unless_torn(data, end, path, "payload")
    return None


def _refuse_unless_torn(data: bytes, offset: int, path: Path, part: str) -> None:
    # After a power cut a file may have its new size before its new content: such a tail is all zeros.
    if data.count(0, offset) != len(data) - offset:
        raise LedgerError(f"{path}: damaged near byte {offset}, before its end (checksum of a {part})")
