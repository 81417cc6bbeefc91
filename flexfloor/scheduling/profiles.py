"""Release profiles by name, with what a configuration overrides. PURE."""

from dataclasses import replace

from flexfloor.config.choices import ReleaseRule
from flexfloor.config.scheduling import SchedulingConfig
from flexfloor.scheduling.release import DRAINED, EAGER, GUARDED, MAX, ReleaseProfile

PROFILES = {
    ReleaseRule.drained: DRAINED,
    ReleaseRule.guarded: GUARDED,
    ReleaseRule.eager: EAGER,
    ReleaseRule.max: MAX,
}


def profile_of(scheduling: SchedulingConfig) -> ReleaseProfile:
    """`scheduling.release` with the price, the budget and the ban on moving that the configuration sets."""
    profile = PROFILES[scheduling.release]
    return replace(
        profile,
        price=profile.price if scheduling.price is None else scheduling.price,
        wall_budget=profile.wall_budget if scheduling.wall_budget is None else scheduling.wall_budget,
        may_move=profile.may_move and scheduling.moving,
    )
