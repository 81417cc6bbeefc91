"""The membership as Prometheus metrics, which SGLang's own /metrics shows.

SGLang collects from a folder that it names in the environment: prometheus_client must not be imported before
that, and a gauge says how those of several processes are put together.
"""

from flexfloor.membership.status import MembershipStatus, OperationResult, RolloutFigures

_STATES = ("starting", "serving", "draining", "parked", "exited", "lost")
_STALL_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """Made once, in the server's main process."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"flexfloor:{name}", text, labels, multiprocess_mode="mostrecent")

        self._epoch = gauge("membership_epoch", "Epoch of the group in force.")
        self._members = gauge("members", "Ranks in the group.")
        self._routed = gauge("routed_ranks", "Members that take new requests.")
        self._floor = gauge("floor", "Fewest ranks that may serve.")
        self._states = gauge("ranks", "Ranks by state.", ("state",))
        self._experts = gauge("experts", "Experts of each rank, 0 where it is away.", ("ep_rank",))
        self._switches = Counter("flexfloor:switches", "Changes of the group.")
        self._bytes = Counter("flexfloor:switch_bytes", "Expert weights received at changes.")
        self._stalls = Histogram(
            "flexfloor:switch_stall_seconds",
            "Longest stall over the ranks that stayed.",
            buckets=_STALL_BUCKETS_S,
        )
        self._operations = Counter("flexfloor:operations", "Releases and rejoins.", ("outcome",))
        self._wall_s = Counter("flexfloor:rollout_seconds", "Wall time of marked rollout steps.")
        self._occupied_s = Counter("flexfloor:occupied_worker_seconds", "Worker time in the group in them.")
        self._static_s = Counter("flexfloor:static_worker_seconds", "The same if nobody had left.")
        self._tokens = Counter("flexfloor:rollout_response_tokens", "Response tokens of them.")
        self._recoveries = Counter("flexfloor:recoveries", "Losses of ranks that the others went on from.")
        self._restored_bytes = Counter("flexfloor:restored_bytes", "Expert weights restored in recoveries.")
        self._recovery_s = Histogram("flexfloor:recovery_seconds", "From a loss to the last rank's return.")
        self._seen_switch = self._seen_recovery = 0

    def take_status(self, status: MembershipStatus) -> None:
        self._epoch.set(status.membership_epoch)
        self._members.set(len(status.members))
        self._routed.set(len(status.routed))
        self._floor.set(status.floor)
        states = list(status.states.values())
        for state in _STATES:
            self._states.labels(state=state).set(states.count(state))
        for rank in status.states:
            self._experts.labels(ep_rank=rank).set(status.experts_per_rank.get(rank, 0))
        for switch in status.last_switches[-1:]:
            if switch.membership_epoch > self._seen_switch:
                self._seen_switch = switch.membership_epoch
                self._switches.inc()
                self._bytes.inc(switch.num_bytes)
                self._stalls.observe(switch.stall_s)
        for recovery in status.recoveries[-1:]:
            if recovery.generation > self._seen_recovery:
                self._seen_recovery = recovery.generation
                self._recoveries.inc()
                self._restored_bytes.inc(recovery.num_bytes)
                self._recovery_s.observe(recovery.recovery_s)

    def take_result(self, result: OperationResult) -> None:
        self._operations.labels(outcome="done" if result.ok else "refused").inc()

    def take_rollout(self, figures: RolloutFigures) -> None:
        self._wall_s.inc(figures.wall_s)
        self._occupied_s.inc(figures.occupied_worker_s)
        self._static_s.inc(figures.static_occupied_worker_s)
        self._tokens.inc(figures.response_tokens)
