"""FlexFloor's side of the server's main process: the group, its routes, its metrics, its own release.

Made after SGLang's tokenizer manager, which every way of starting a server makes in the process that owns the
ranks; hooks on what launches a server would come too late for servers that are not started by its command.
"""

import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.status import MembershipStatus, OperationResult
from sglang_patches import CONFIG_ENV, plugin_config
from sglang_patches.elastic import serving
from sglang_patches.elastic.topology import known_num_experts
from sglang_patches.http.auth import PREFIX, Keys
from sglang_patches.http.events import EventLog
from sglang_patches.http.metrics import Metrics
from sglang_patches.http.operations import Operations
from sglang_patches.http.rollout import Presence
from sglang_patches.http.rollouts import Rollouts
from sglang_patches.http.view import changed_at, events_between, membership_json
from sglang_patches.plugin_config import PluginConfig
from sglang_patches.release.control import Group, ReleaseControl
from sglang_patches.release.rule import ServerRelease
from sglang_patches.release.tracker import RequestTracker, SentRequest
from sglang_patches.release.weigh import CostWeigher
from sglang_patches.static_group import StaticGroup

logger = logging.getLogger(__name__)

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_COUNTERS_TIMEOUT_S = 60.0
_NO_CAP = 1 << 30

_current: "ServerSide | None" = None


def current() -> "ServerSide | None":
    """This process's; None outside the server's main process."""
    return _current


def start(tokenizer_manager: Any) -> None:
    """After the tokenizer manager is made."""
    global _current
    from sglang.srt.runtime_context import get_serving

    config = plugin_config.read(os.environ[CONFIG_ENV])
    if get_serving().tokenizer_worker_num > 1:
        logger.warning("flexfloor: no routes under %s with --tokenizer-worker-num > 1", PREFIX)
        return
    _current = ServerSide(tokenizer_manager, config)
    http_server = sys.modules.get(_HTTP_SERVER)
    if http_server is not None:
        _current.serve(http_server.app)


class ServerSide:
    """What the routes ask."""

    def __init__(self, tokenizer_manager: Any, config: PluginConfig) -> None:
        from sglang.srt.runtime_context import get_observability

        self._tokenizer_manager = tokenizer_manager
        self._config = config
        self._clock_zero_s = time.time() - time.monotonic()
        self._token = Endpoint.read(Path(config.folder)).token if config.folder else ""
        self.events = EventLog()
        self.operations = Operations()
        self._metrics = Metrics() if get_observability().enable_metrics else None
        self._tracker = RequestTracker()
        self._seen: MembershipStatus | None = None
        self._presence = Presence((), time.monotonic())
        self.group: Group = self._make_group()
        self.rollouts = Rollouts(
            status=self.group.status,
            rejoin=self.group.rejoin,
            presence=self._presence,
            counters=self._counters,
            num_tokens=lambda: self._tracker.num_tokens,
            on_mark=self._take_mark,
            timeout_s=max(60.0, 2 * config.prepare_timeout_s),
        )
        self._control = self._make_control() if config.release != "manual" else None

    def serve(self, app: Any) -> None:
        """Add the routes."""
        from sglang.srt.runtime_context import get_serving

        from sglang_patches.http import routes
        from sglang_patches.plugin import refuse

        root_path = get_serving().fastapi_root_path or ""
        if (root_path + "/").startswith(PREFIX):
            # SGLang's check of keys lets these paths through to ours.
            refuse(f"--fastapi-root-path={root_path}: {PREFIX} is FlexFloor's. Fix: choose another one")
        routes.install(app, self)

    # What a route asks.

    def keys(self) -> Keys:
        from sglang.srt.runtime_context import get_serving

        serving_args = get_serving()
        return Keys(api=serving_args.api_key or "", admin=serving_args.admin_api_key or "", token=self._token)

    def membership_json(self) -> dict[str, Any]:
        shown = membership_json(
            self.group.status(),
            mode=self._config.membership,
            release=self._config.release,
            clock_zero_s=self._clock_zero_s,
        )
        return {**shown, "num_dropped": self.group.num_dropped}

    def load(self) -> dict[int, int]:
        """Requests of each rank, as it last reported them."""
        loads = self._tokenizer_manager.load_snapshot_reader.read_all()
        return {load.dp_rank: load.num_running_reqs + load.num_waiting_reqs for load in loads}

    def is_stopping(self) -> bool:
        return bool(self._tokenizer_manager.gracefully_exit)

    def shut_down(self) -> None:
        """The ranks are told to end."""
        membership = serving.current()
        if membership is not None:
            membership.shut_down()

    # What a request does.

    def take_request(self, request: Any) -> None:
        """Before SGLang sends a tokenized request to the ranks: place it, and keep it in the books."""
        state = self._tokenizer_manager.rid_to_state.get(request.rid)
        if state is None or self._is_health_check(request.rid):
            return
        if self._control is not None:
            request.routed_dp_rank = self._control.place(request.routed_dp_rank)
        membership = serving.current()
        if membership is not None and membership.recovers:
            if request.routed_dp_rank is None:
                targets = membership.targets()
                request.routed_dp_rank = membership.losses.choose(targets, self._load_to_balance())
            membership.losses.refuse(request.rid, request.routed_dp_rank)
        cap_tokens = getattr(request.sampling_params, "max_new_tokens", None)
        self._tracker.send(
            SentRequest(
                request_id=request.rid,
                dp_rank=request.routed_dp_rank,
                prompt_tokens=len(request.input_ids or ()),
                cap_tokens=_NO_CAP if cap_tokens is None else cap_tokens,
                state=state,
            )
        )
        if self._control is not None:
            self._control.watch()
        elif len(self._tracker) % 64 == 0:
            # Nobody else looks: what is over must not pile up.
            self._tracker.settle(self._tokenizer_manager.rid_to_state)

    def _load_to_balance(self) -> dict[int, int] | None:
        """What --load-balance-method looks at, by rank; None where ranks take turns."""
        from sglang.srt.runtime_context import get_parallel

        method = get_parallel().load_balance_method
        if method in ("auto", "round_robin"):
            return None
        load: Counter[int] = Counter()
        live = self._tokenizer_manager.rid_to_state
        for one in self._tracker:
            if one.dp_rank is not None and live.get(one.request_id) is one.state:
                load[one.dp_rank] += 1 if method == "total_requests" else one.prompt_tokens + one.num_tokens
        return load

    # Wiring.

    def _make_group(self) -> Group:
        if self._config.membership == "elastic":
            membership = serving.start(
                self._tokenizer_manager, self._take_status, self._take_result, self._abandon
            )
            return membership.manager
        from sglang.srt.runtime_context import get_parallel

        parallel, manager = get_parallel(), self._tokenizer_manager
        num_ranks = parallel.tp_size
        is_spread = parallel.ep_size == num_ranks
        num_experts = known_num_experts(manager.model_config.hf_text_config) if is_spread else 0
        group = StaticGroup(num_ranks, num_experts, lambda: str(manager.config_value("weight_version")))
        self._take_status(group.status())
        return group

    def _make_control(self) -> ReleaseControl:
        config, num_ranks = self._config, len(self.group.status().states)
        weigher = CostWeigher(config.clock, num_ranks, config.floor) if config.release == "policy" else None
        return ReleaseControl(
            self.group,
            ServerRelease(num_ranks, quiet_s=config.release_quiet_s),
            self._tracker,
            self._tokenizer_manager.rid_to_state,
            is_on=lambda: self.rollouts.is_running or not self.rollouts.marks_steps,
            weigher=weigher,
        )

    def _abandon(self, ep_rank: int) -> None:
        """On the event loop."""
        membership = serving.current()
        assert membership is not None
        live = self._tokenizer_manager.rid_to_state
        own = [one for one in self._tracker if one.dp_rank == ep_rank]
        membership.losses.abandon(
            ep_rank, [one.request_id for one in own if live.get(one.request_id) is one.state]
        )

    def _take_status(self, status: MembershipStatus) -> None:
        """In the manager's thread."""
        before, self._seen = self._seen, status
        if self._metrics is not None:
            self._metrics.take_status(status)
        if before is None:
            self._presence.change(status.members, time.monotonic())
            return
        if status.membership_epoch != before.membership_epoch:
            self._presence.change(status.members, changed_at(status))
        for event in events_between(before, status):
            self.events.add(event)

    def _take_result(self, result: OperationResult) -> None:
        """In the manager's thread."""
        self.operations.finish(result)
        if self._metrics is not None:
            self._metrics.take_result(result)
        outcome = {"status": "done"} if result.ok else {"status": "refused", "reason": result.reason}
        epoch = result.membership_epoch
        operation = {"operation_id": result.operation_id, **outcome, "membership_epoch": epoch}
        self.events.add({"type": "operation", **operation})

    def _take_mark(self, mark: dict[str, Any]) -> None:
        self.events.add(mark)
        if self._metrics is not None and self.rollouts.last is not None and mark["action"] == "end":
            self._metrics.take_rollout(self.rollouts.last)

    async def _counters(self) -> Mapping[int, int]:
        states = await asyncio.wait_for(self._tokenizer_manager.get_internal_state(), _COUNTERS_TIMEOUT_S)
        rows = [state["flexfloor"] for state in states]
        # Ranks that have exited said it when they left.
        gone = self.group.status().last_counters
        return {
            **{rank: counters["num_iterations"] for rank, counters in gone.items()},
            **{row["dp_rank"]: row["num_iterations"] for row in rows},
        }

    @staticmethod
    def _is_health_check(request_id: str) -> bool:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

        return request_id.startswith(HEALTH_CHECK_RID_PREFIX)
