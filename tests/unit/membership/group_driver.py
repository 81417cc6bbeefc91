"""Drives a Membership by hand: a clock that moves one second per event, and short names for events."""

from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership.state import Membership


class GroupDriver:
    """Every event is followed by `validate()`. A rank's incarnation is 100 + ep_rank."""

    def __init__(
        self, ep_size: int = 4, floor: int = 1, *, joined: bool = True, recovers: bool = True
    ) -> None:
        self.membership = Membership(
            ep_size,
            floor,
            num_experts=2 * ep_size,
            prepare_timeout_s=60,
            cancel_timeout_s=30,
            switch_timeout_s=40,
            recovers=recovers,
            loss_wait_s=10,
            recover_timeout_s=100,
        )
        self.now_s = 0.0
        self.num_operations = 0
        if joined:
            for ep_rank in range(ep_size):
                self.join(ep_rank)

    def feed(self, event: e.Event) -> list[c.Command]:
        commands = self.membership.handle(event)
        self.membership.validate()
        return commands

    def tick(self, seconds: float = 1.0) -> float:
        self.now_s += seconds
        return self.now_s

    def _life(self, ep_rank: int) -> dict[str, float]:
        return {"ep_rank": ep_rank, "incarnation": 100 + ep_rank, "at": self.tick()}

    def join(self, ep_rank: int, weight_version: int = 0) -> list[c.Command]:
        return self.feed(e.RankJoined(**self._life(ep_rank), weight_version=weight_version))

    def release(
        self, *ep_ranks: int, leave: e.Leave = e.Leave.park, operation_id: str = ""
    ) -> list[c.Command]:
        name = self._operation(operation_id)
        return self.feed(
            e.ReleaseRequested(operation_id=name, ep_ranks=ep_ranks, leave=leave, at=self.tick())
        )

    def rejoin(self, *ep_ranks: int, operation_id: str = "") -> list[c.Command]:
        name = self._operation(operation_id)
        return self.feed(e.RejoinRequested(operation_id=name, ep_ranks=ep_ranks, at=self.tick()))

    def drained(self, ep_rank: int) -> list[c.Command]:
        return self.feed(e.DrainFinished(**self._life(ep_rank)))

    def switched(
        self, ep_rank: int, epoch: int, *, stall_s: float = 0.0, num_bytes: int = 0
    ) -> list[c.Command]:
        life = self._life(ep_rank)
        return self.feed(e.RankSwitched(**life, membership_epoch=epoch, stall_s=stall_s, num_bytes=num_bytes))

    def all_switched(self, *ep_ranks: int, epoch: int) -> list[c.Command]:
        return [command for rank in ep_ranks for command in self.switched(rank, epoch)]

    def ask_cancel(self, ep_rank: int, epoch: int) -> list[c.Command]:
        return self.feed(e.CancelAsked(**self._life(ep_rank), membership_epoch=epoch))

    def answer(self, ep_rank: int, epoch: int, *, dropped: bool) -> list[c.Command]:
        life = self._life(ep_rank)
        return self.feed(e.CancelAnswered(**life, membership_epoch=epoch, dropped=dropped))

    def work(self, ep_rank: int) -> list[c.Command]:
        return self.feed(e.WorkArrived(**self._life(ep_rank)))

    def lost(self, ep_rank: int, reason: str = "killed") -> list[c.Command]:
        return self.feed(e.RankLost(**self._life(ep_rank), reason=reason))

    def broke(
        self,
        ep_rank: int,
        *,
        epoch: int,
        slots: tuple[int | None, ...] | None = None,
        version: e.WeightVersion | None = 0,
        generation: int | None = None,
    ) -> list[c.Command]:
        """By itself: what the placement says of it, at the newest generation."""
        membership = self.membership
        if slots is None:
            is_in = ep_rank in membership.placement.members
            slots = membership.placement.experts_on(ep_rank) if is_in else ()
        return self.feed(
            e.RankBroke(
                **self._life(ep_rank),
                generation=membership.generation if generation is None else generation,
                membership_epoch=epoch,
                slots=slots,
                weight_version=version,
                where="gather",
            )
        )

    def all_broke(self, *ep_ranks: int, epoch: int) -> list[c.Command]:
        return [command for rank in ep_ranks for command in self.broke(rank, epoch=epoch)]

    def recovered(self, ep_rank: int, epoch: int, *, generation: int | None = None) -> list[c.Command]:
        newest = self.membership.generation
        return self.feed(
            e.RankRecovered(
                **self._life(ep_rank),
                generation=newest if generation is None else generation,
                membership_epoch=epoch,
                stall_s=0.5,
                num_bytes=10,
            )
        )

    def all_recovered(self, *ep_ranks: int, epoch: int) -> list[c.Command]:
        return [command for rank in ep_ranks for command in self.recovered(rank, epoch)]

    def fence(self, fence_id: str, *, full: bool = False) -> list[c.Command]:
        return self.feed(e.FenceRequested(fence_id=fence_id, full=full, at=self.tick()))

    def unfence(self, fence_id: str) -> list[c.Command]:
        return self.feed(e.FenceReleased(fence_id=fence_id, at=self.tick()))

    def updated(self, weight_version: int) -> list[c.Command]:
        return self.feed(e.WeightsUpdated(weight_version=weight_version, at=self.tick()))

    def wait(self, seconds: float) -> list[c.Command]:
        return self.feed(e.TimePassed(at=self.tick(seconds)))

    def park(self, *ep_ranks: int) -> None:
        """The whole way of a release, in one change."""
        old = self.membership.members
        self.fence("gather")
        self.release(*ep_ranks)
        for ep_rank in ep_ranks:
            self.drained(ep_rank)
        self.unfence("gather")
        self.all_switched(*old, epoch=self.membership.last_epoch)

    def _operation(self, operation_id: str) -> str:
        self.num_operations += not operation_id
        return operation_id or f"op{self.num_operations}"


def states(group: GroupDriver) -> str:
    """First letters by rank; x is exited."""
    return "".join({"exited": "x"}.get(rank.state, rank.state[0]) for rank in group.membership.ranks)


def only(commands: list[c.Command], kind: type[c.Command]) -> list[c.Command]:
    return [command for command in commands if isinstance(command, kind)]


def finished(operation_id: str, epoch: int, reason: str = "") -> c.FinishOperation:
    return c.FinishOperation(operation_id=operation_id, ok=not reason, reason=reason, membership_epoch=epoch)
