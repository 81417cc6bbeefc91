"""What must hold in every story, looked at after each event that could break it."""

from collections import Counter
from typing import TYPE_CHECKING

from net_rank import SimRank

from flexfloor.membership.ranks import RankState

if TYPE_CHECKING:
    from net_server import Server
    from net_world import World

INVARIANTS = {
    "membership": "the membership's own invariants (flexfloor.membership.invariants)",
    "epoch_grows": "the membership epoch never falls",
    "one_membership_per_epoch": "all ranks that enter an epoch enter it with the same members",
    "experts_served": "in each iteration every logical expert is served, by one slot",
    "same_weights": "an iteration that generates has the weights of one version on all members",
    "newest_group": "no live rank iterates in an epoch older than another live rank's",
    "one_rank_per_response": "a rank that counts as live holds the responses only that are its own",
    "leaver_is_free": "no rank leaves the group with a response that it has begun",
    "response_once": "no response ends twice",
    "quiet": "no group breaks and no rank is lost for lost, late or repeated messages or for a clock alone",
    "protocol": "no rank says what it cannot say",
    "legitimate_end": "the group fails below the floor, in a weight update and before it is whole only",
    "assertion": "no assertion of the code itself fails",
    "progress": "when the faults stop, every request, operation and change ends",
}
LEGITIMATE = ("the floor is", "the loss came in a weight update", "not every rank had joined")


class Violation(AssertionError):
    def __init__(self, invariant: str, text: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {text}")


class Checks:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.num_checked: Counter[str] = Counter()
        self._rosters: dict[tuple[int, int], tuple[int, ...]] = {}
        self._epochs: dict[int, int] = {}
        self._newest_gather: dict[int, int] = {}

    def that(self, invariant: str, holds: bool, text: str) -> None:
        self.num_checked[invariant] += 1
        if not holds:
            raise Violation(invariant, text)

    def hold(self, holds: bool, text: str) -> None:
        self.that("response_once", holds, text)

    def entered(self, rank: SimRank, epoch: int, members: tuple[int, ...]) -> None:
        rank.server.groups.open(epoch, members)
        known = self._rosters.setdefault((rank.server.number, epoch), members)
        text = f"epoch {epoch} has members {known}, ep_rank {rank.ep_rank} enters with {members}"
        self.that("one_membership_per_epoch", known == members, text)

    def after_turn(self, server: "Server") -> None:
        membership = server.membership
        if not server.has_changed:
            return
        server.has_changed = False
        self.num_checked["membership"] += 1
        try:
            membership.validate()
        except (AssertionError, ValueError) as error:
            raise Violation("membership", str(error)) from error
        before = self._epochs.get(server.number, 0)
        self._epochs[server.number] = membership.membership_epoch
        text = f"from {before} to {membership.membership_epoch}"
        self.that("epoch_grows", membership.membership_epoch >= before, text)
        is_quiet = membership.generation == 0 and membership.recovery is None
        self.that("quiet", self._world.is_severe or is_quiet, membership.story())
        for peer in server.peers.agents.values():
            is_wrong = "does not accept" in peer.lost_reason
            self.that("protocol", not is_wrong, peer.lost_reason)

    def gather(self, ranks: list[SimRank]) -> bool:
        """A gather of these ranks is complete. Whether the iteration generates."""
        server = ranks[0].server
        generates = any(rank.work for rank in ranks)
        if server is not self._world.server or any(not self.counts_as_live(rank) for rank in ranks):
            return generates
        epoch, where = ranks[0].member.epoch, f"epoch {ranks[0].member.epoch} t={self._world.now_s:.2f}"
        placed = sorted(expert for rank in ranks for expert in rank.slots if expert is not None)
        is_whole = placed == list(range(server.membership.num_experts))
        self.that("experts_served", is_whole, f"{where}: {[rank.slots for rank in ranks]}")
        newest = max(epoch, self._newest_gather.get(server.number, 0))
        self._newest_gather[server.number] = newest
        self.that("newest_group", epoch == newest, f"{where}, and {newest} has iterated")
        for rank in ranks:
            for response in rank.work:
                is_own = self._world.clients.owners[response] is rank
                self.that("one_rank_per_response", is_own, f"{where}: {response} on ep_rank {rank.ep_rank}")
        if self._world.updates.is_running(server):
            return False
        versions = {rank.weight_version for rank in ranks}
        self.that("same_weights", not generates or len(versions) == 1, f"{where}: weights {versions}")
        return generates

    def counts_as_live(self, rank: SimRank) -> bool:
        return rank.server.membership.ranks[rank.ep_rank].state is not RankState.lost

    def ended(self, reason: str) -> None:
        is_legitimate = self._world.is_severe and any(text in reason for text in LEGITIMATE)
        self.that("legitimate_end", is_legitimate, reason)
