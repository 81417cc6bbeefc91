"""Control calls of the server that need a group that stands still. PURE; Membership's own book."""


class Fences:
    def __init__(self) -> None:
        self.held: set[str] = set()
        self.waiting: dict[str, bool] = {}
        """fence_id -> it needs every live rank; in order of arrival."""

    @property
    def num_all(self) -> int:
        return len(self.held) + len(self.waiting)

    @property
    def is_full_wanted(self) -> bool:
        return any(self.waiting.values())

    def grant(self, *, is_full: bool) -> list[str]:
        """The group stands still, and `is_full`: no live rank is outside. Whose wait is over."""
        granted = [name for name, full in self.waiting.items() if is_full or not full]
        for name in granted:
            del self.waiting[name]
        self.held.update(granted)
        return granted

    def refuse(self, *, full_only: bool) -> list[str]:
        refused = [name for name, full in self.waiting.items() if full or not full_only]
        for name in refused:
            del self.waiting[name]
        return refused

    def release(self, fence_id: str) -> bool:
        """False: nobody knows it. A fence that still waits is given up."""
        known = fence_id in self.held or fence_id in self.waiting
        self.held.discard(fence_id)
        self.waiting.pop(fence_id, None)
        return known
