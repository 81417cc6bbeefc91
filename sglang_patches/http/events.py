"""The last events of the membership, for any number of streams: each reads at its own pace from one list.

Events come from the manager's thread and from the event loop; streams live in the loop.
"""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from sglang_patches.http.view import Event

NUM_KEPT = 1000
MAX_STREAMS = 64
BEAT_S = 15.0
"""A comment goes out after so long without an event, so that a lost client is noticed."""
_LOOK_S = 1.0
"""How soon a stream sees that the server is being stopped."""


class EventLog:
    """Numbers from 1, unique within one run of the server."""

    def __init__(self, num_kept: int = NUM_KEPT, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[tuple[int, str]] = deque(maxlen=num_kept)
        self._last_id = 0
        self._wakers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def last_id(self) -> int:
        return self._last_id

    @property
    def num_streams(self) -> int:
        return len(self._wakers)

    def add(self, event: Event) -> None:
        """From any thread."""
        with self._lock:
            self._last_id += 1
            stamped = {"id": self._last_id, "at": self._clock(), **event}
            self._events.append((self._last_id, _frame(stamped)))
            for waker, loop in self._wakers.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(waker.set)

    def after(self, last_id: int) -> list[tuple[int, str]]:
        """Those that are kept with a higher number, as frames of the stream."""
        with self._lock:
            return [(number, frame) for number, frame in self._events if number > last_id]

    async def stream(self, last_id: int, is_over: Callable[[], bool]) -> AsyncIterator[str]:
        """Frames after `last_id`, until `is_over`. What was dropped in between is said in a comment."""
        waker = asyncio.Event()
        with self._lock:
            self._wakers[waker] = asyncio.get_running_loop()
        try:
            yield ": flexfloor\n\n"
            silent_s = 0.0
            while True:
                waker.clear()
                found = self.after(last_id)
                if found and found[0][0] > last_id + 1:
                    yield f": {found[0][0] - last_id - 1} events are no longer kept\n\n"
                for number, frame in found:
                    last_id = number
                    yield frame
                if is_over():
                    return
                silent_s = 0.0 if found else silent_s
                silent_s += await _wait(waker)
                if silent_s >= BEAT_S:
                    silent_s = 0.0
                    yield ": beat\n\n"
        finally:
            with self._lock:
                del self._wakers[waker]


async def _wait(waker: asyncio.Event) -> float:
    """Seconds that went by without an event."""
    try:
        await asyncio.wait_for(waker.wait(), _LOOK_S)
    except TimeoutError:
        return _LOOK_S
    return 0.0


def _frame(event: Event) -> str:
    return f"id: {event['id']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"
