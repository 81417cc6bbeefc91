"""One gloo device for all groups of a process.

Every gloo group makes a device of its own, with a thread that looks 100 times a second whether anything has
come. A rank has some twenty groups, most of them of one rank: that alone takes 3 % of a core from a rank that
waits, and wakes its neighbours' cores two thousand times a second.
"""

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

_WORKER_THREADS = 2
"""What torch gives a group by default."""
_Gloo: Any = distributed_c10d.ProcessGroupGloo


class SharedDeviceGloo(_Gloo):  # type: ignore[misc]
    """torch's gloo group on the process's one device."""

    _device: Any = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._devices = [self._shared_device()]
        options._timeout = timeout
        options._threads = _WORKER_THREADS
        super().__init__(store, rank, size, options)

    @classmethod
    def _shared_device(cls) -> Any:
        if SharedDeviceGloo._device is None:
            SharedDeviceGloo._device = _Gloo.create_default_device()
        return SharedDeviceGloo._device


def share_device() -> None:
    """All gloo groups that this process makes from now on share a device."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]
