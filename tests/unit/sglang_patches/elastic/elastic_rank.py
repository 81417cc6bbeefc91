"""A rank whose neighbours are played by hand, and the changes that it is told of."""

import os
from dataclasses import dataclass, field

from elastic_fakes import (
    NUM_EXPERTS,
    Experts,
    Graphs,
    Link,
    Memory,
    Parallel,
    Preparer,
    Scheduler,
    prepare_msg,
)

from flexfloor.experts.placement import canonical
from flexfloor.membership.messages import OrderMsg
from sglang_patches.elastic.delays import DelayConfig, Delays
from sglang_patches.elastic.runtime import ElasticRuntime

ALL, WITHOUT_3 = (0, 1, 2, 3), (0, 1, 2)
SHRINK = prepare_msg(1, ALL, WITHOUT_3)
"""ep_rank 3 leaves."""
GROW = prepare_msg(2, WITHOUT_3, ALL)
"""It returns."""


@dataclass(kw_only=True)
class Rank:
    """A runtime and its neighbours; the journal holds what happened to all of them, in order."""

    ep_rank: int
    journal: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.journal)
        self.link = Link(self.journal)
        self.preparer = Preparer()
        self.parallel = Parallel(self.journal)
        self.runtime = ElasticRuntime(
            self.scheduler,
            self.ep_rank,
            self.link,  # type: ignore[arg-type]
            self.preparer,  # type: ignore[arg-type]
            Experts(self.journal),  # type: ignore[arg-type]
            Memory(self.journal),  # type: ignore[arg-type]
            canonical(NUM_EXPERTS, 4),
            Delays(DelayConfig(), self.ep_rank, "loop"),
            Graphs(),  # type: ignore[arg-type]
        )

    def close(self) -> None:
        inbox = self.scheduler.request_receiver.recv_from_tokenizer
        for descriptor in (inbox, self.link.wake_fd, self.preparer.done_fd):
            os.close(descriptor)

    def loop(self, *orders: OrderMsg) -> None:
        """One loop top, with these orders waiting."""
        self.link.batches.appendleft(list(orders))
        self.runtime.at_loop_top()

    def prepared(self, order: OrderMsg = SHRINK) -> "Rank":
        self.loop(order)
        self.preparer.finish()
        return self

    def gather(self, votes: list[int] | None = None, *, num_tokens: int = 0) -> int:
        """An iteration's gather in which all vote like this rank, or as named; returns its vote."""
        vote = self.runtime.vote(num_tokens)
        self.runtime.read_votes([vote] * 4 if votes is None else votes)
        return vote

    def sent(self, kind: type) -> list[object]:
        return [message for message in self.link.sent if isinstance(message, kind)]
