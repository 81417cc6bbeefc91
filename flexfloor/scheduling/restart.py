"""Release where it costs a restart of the server before the next step. PURE."""

from dataclasses import dataclass

from flexfloor.scheduling.decision import GroupView, ReleaseDecision, ReleasePolicy


@dataclass(slots=True, kw_only=True)
class RestartPriced(ReleasePolicy):
    """Another policy's orders, but for the first of a step that does not gain what the restart weighs.

    Once a rank is gone the restart is due in any case, and further ones cost nothing more. The weight is that
    of rule 1 in `release`: `restart_s` is wall time, in which every rank of the full group is occupied.
    """

    policy: ReleasePolicy
    restart_s: float
    """How much later the next step begins."""
    price: float
    """Lambda of the policy's profile."""

    def decide(self, view: GroupView) -> ReleaseDecision:
        decision = self.policy.decide(view)
        if decision.is_stay or len(view.members) < view.num_ranks:
            return decision
        weight_s = self.restart_s * view.num_ranks * (1 + self.price)
        if decision.predicted_gain_s > weight_s:
            return decision
        return ReleaseDecision(
            reason=f"{decision.reason}; the server's restart weighs {weight_s:.4g} s",
            predicted_remaining_s=decision.predicted_remaining_s,
        )

    def observe(self, *, predicted_s: float, observed_s: float) -> None:
        self.policy.observe(predicted_s=predicted_s, observed_s=observed_s)
