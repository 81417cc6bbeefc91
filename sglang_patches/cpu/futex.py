"""Sleep until another process changes a word of shared memory: Linux futexes on x86-64.

A waiting rank must not spin: where ranks share cores, a spinning one holds the core for its whole time slice,
and the rank that it waits for is the one that waits for that core.
"""

import ctypes
import errno

_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL_WAITERS = 0x7FFF_FFFF

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`, at most `timeout_s`; may return early.

    Raises OSError when the kernel refuses, e.g. for an address that is not mapped.
    """
    timeout = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9))
    word = ctypes.c_uint32(expected)
    arguments = (ctypes.c_void_p(address), _FUTEX_WAIT, word, ctypes.byref(timeout), None, 0)
    if _syscall(_SYS_FUTEX, *arguments) == 0:
        return
    code = ctypes.get_errno()
    # The word had changed already, the time is over, or a signal came: the caller looks again.
    if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(code, f"futex wait on {address:#x} failed")


def wake_all(address: int) -> None:
    """Wake every process that sleeps on the word at `address`."""
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)
