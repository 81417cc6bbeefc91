"""A router for verl 0.9.1: `actor_rollout_ref.rollout.router_config_path` names a YAML file such as

    router_class: flexfloor.integrations.verl_router.FlexfloorRouter
    poll_s: 2.0                       # how often replicas are asked for their membership; 0: never
    ranks_per_replica: 1              # taken of a replica that does not say it itself
    max_requests_per_rank: null       # a number: fill replicas one by one, so that the last stay drained
    api_key: null                     # SGLang's, where the replicas have one

verl makes it a Ray actor and calls it once per request. It chooses among replicas, as that is what verl asks
for; the rank within a replica is the server's choice. A replica without FlexFloor's routes never shrinks.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexfloor.errors import FlexfloorError
from flexfloor.integrations.replicas import ReplicaPool
from flexfloor.integrations.server_control import ServerControl

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The YAML file, but for `router_class`."""

    poll_s: float = 2.0
    ranks_per_replica: int = 1
    max_requests_per_rank: int | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.poll_s >= 0:
            raise ValueError(f"poll_s={self.poll_s}: not a time. Fix: give seconds, or 0 to never ask")

    @classmethod
    def from_yaml(cls, values: Mapping[str, Any]) -> "RouterConfig":
        """Raises ValueError naming a key that there is not."""
        own = {name: value for name, value in values.items() if name != "router_class"}
        unknown = sorted(set(own) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"router configuration: {', '.join(unknown)}: no such key. Fix: one of {known}")
        return cls(**own)


class FlexfloorRouter:
    """verl's `RequestLoadBalancer`. Methods may be called from several threads."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        self._config = RouterConfig.from_yaml(config)
        self._pool = ReplicaPool(
            max_requests_per_rank=self._config.max_requests_per_rank,
            num_ranks=self._config.ranks_per_replica,
        )
        self._handles: dict[str, Any] = {}
        self._without_routes: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.add_servers(servers)
        if self._config.poll_s > 0:
            threading.Thread(target=self._poll, name="flexfloor-router", daemon=True).start()

    def require_acquire_fields(self) -> list[str]:
        """The request id is enough."""
        return []

    def require_release_fields(self) -> list[str]:
        return []

    def acquire_server(self, request_id: str, **_declared: Any) -> tuple[str, Any]:
        """A replica and its handle. Raises RuntimeError in verl's words when there is none."""
        with self._lock:
            server_id = self._pool.acquire(request_id)
            return server_id, self._handles[server_id]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        with self._lock:
            self._pool.release(server_id)

    def add_servers(self, servers: dict[str, Any]) -> None:
        with self._lock:
            self._handles.update(servers)
            self._without_routes -= set(servers)
            self._pool.add(servers)

    def remove_servers(self, server_ids: list[str]) -> None:
        with self._lock:
            self._pool.remove(server_ids)
            for server_id in server_ids:
                self._handles.pop(server_id, None)

    def get_all_servers(self) -> list[str]:
        with self._lock:
            return self._pool.server_ids

    def get_status(self) -> dict[str, Any]:
        """verl's keys, and the ranks of each replica that get new requests."""
        with self._lock:
            inflight = self._pool.inflight
            return {
                "servers": inflight,
                "total_inflight": sum(inflight.values()),
                "active_servers": len(inflight),
                "registered_handles": list(self._handles),
                "num_routed": self._pool.num_routed,
            }

    def clear_sticky_cache(self) -> dict[str, Any]:
        with self._lock:
            return {"cleared_entries": self._pool.clear_sticky(), "server_loads": self._pool.inflight}

    def get_total_inflight(self) -> int:
        with self._lock:
            return sum(self._pool.inflight.values())

    def refresh(self) -> None:
        """Ask every replica for its membership now. One that does not answer keeps what it last said."""
        with self._lock:
            asked = [name for name in self._pool.server_ids if name not in self._without_routes]
        for server_id in asked:
            self._ask(server_id)

    def close(self) -> None:
        """End the asking. A Ray actor's process may simply end instead."""
        self._stop.set()

    def _poll(self) -> None:
        self.refresh()
        while not self._stop.wait(self._config.poll_s):
            self.refresh()

    def _ask(self, server_id: str) -> None:
        control = ServerControl(f"http://{server_id}", key=self._config.api_key, timeout_s=_POLL_TIMEOUT_S)
        try:
            view = control.membership()
        except FlexfloorError as error:
            logger.debug("replica %s: %s", server_id, error)
            return
        finally:
            control.close()
        with self._lock:
            if view is not None:
                self._pool.set_membership(server_id, num_ranks=view.ep_size, num_routed=len(view.routed))
                return
            self._without_routes.add(server_id)
        logger.warning("replica %s has no /flexfloor routes: it does not shrink", server_id)
