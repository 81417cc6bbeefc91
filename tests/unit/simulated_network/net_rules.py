"""Rules of the protocol, each broken on purpose, to see that the stories find it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flexfloor.membership import commands as c
from flexfloor.membership.losses import Losses
from flexfloor.membership.member import Member
from flexfloor.membership.session import Session


def _take_as_it_comes(_old: Any, session: Session, number: int, message: Any) -> Any:
    session.heard = max(session.heard, number)
    return (message,)


def _vote_with_work(old: Any, member: Any, _num_tokens: int, _is_drained: Any) -> Any:
    return old(member, 0, lambda: True)


def _switch_on_any_vote(_old: Any, member: Any, votes: Any) -> None:
    plan = member.plan
    if plan is not None and plan.membership_epoch in votes:
        plan.agreed = True


def _stay_put(_old: Any, _losses: Losses, *_args: Any) -> None:
    pass


def _forget_the_requests(old: Any, losses: Losses, *args: Any) -> None:
    old(losses, *args)
    losses._out = [command for command in losses._out if not isinstance(command, c.AbandonRank)]


def _give_the_epoch_again(old: Any, losses: Losses, *args: Any) -> Any:
    losses.last_epoch -= losses.last_epoch > losses.membership_epoch
    return old(losses, *args)


RULES = {
    "messages are taken once and in order": (Session, "take", _take_as_it_comes),
    "a membership epoch is given once": (Losses, "_restore", _give_the_epoch_again),
    "a switch needs every vote": (Member, "read_votes", _switch_on_any_vote),
    "a rank is where its own epoch puts it": (Losses, "_place_rank", _stay_put),
    "requests of a lost rank are ended": (Losses, "_lose", _forget_the_requests),
    "a leaver votes only without work": (Member, "vote", _vote_with_work),
}
"""name -> (class, method, what stands in for it)."""


@contextmanager
def broken(rule: str) -> Iterator[None]:
    owner, name, stand_in = RULES[rule]
    old = getattr(owner, name)
    setattr(owner, name, lambda *args: stand_in(old, *args))
    try:
        yield
    finally:
        setattr(owner, name, old)
