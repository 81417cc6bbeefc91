"""The `/flexfloor/` routes of one server, as a foreign driver calls them. Every call has a deadline.

Synchronous: verl's router and slime's rollout function are called outside any event loop.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import requests

from flexfloor.errors import DeadlineExceeded, FlexfloorError
from flexfloor.membership.status import RolloutFigures

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

CALL_TIMEOUT_S = 10.0
REJOIN_TIMEOUT_S = 600.0
"""Begin and end of a rollout wait until every rank is back: on a GPU a rejoin copies weights."""


class ServerRefused(FlexfloorError):
    """The server said no; the text names the server, the call and the server's reason."""


class MembershipView(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /flexfloor/membership` says that a driver decides by."""

    membership_epoch: int
    members: tuple[int, ...]
    routed: tuple[int, ...]
    """Ranks that get new requests."""
    states: dict[str, str]
    """State of every rank that there ever was, by ep_rank."""

    @property
    def ep_size(self) -> int:
        return len(self.states)

    @property
    def is_full(self) -> bool:
        return len(self.members) == len(self.routed) == self.ep_size


class ServerControl:
    """Example: ServerControl("http://node1:30000", key=token).begin_rollout(7)

    `key` is sent as the bearer: SGLang's admin key, or where there is none the token of the server's
    `--flexfloor-folder` (`read_token`).
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = requests.Session()
        # A proxy of the environment must not see the key, nor be asked for a server of the same cluster.
        self._http.trust_env = False
        if key is not None:
            self._http.headers["Authorization"] = f"Bearer {key}"

    def membership(self) -> MembershipView | None:
        """None: this server has no FlexFloor routes. ServerRefused, DeadlineExceeded."""
        reply = self._call("GET", "/flexfloor/membership")
        if reply.status_code == requests.codes.not_found:
            return None
        return self._decoded(reply, MembershipView)

    def begin_rollout(self, rollout_step: int, timeout_s: float = REJOIN_TIMEOUT_S) -> None:
        """Mark the begin of a step. One that a driver began and did not end, as it died, is ended first."""
        body = {"action": "begin", "rollout_step": rollout_step}
        reply = self._mark(body, timeout_s)
        if reply.status_code == requests.codes.conflict:
            logger.warning("%s: %s; ending it", self.url, _reason(reply))
            ended = self._mark({"action": "end"}, timeout_s)
            reply = self._mark(body, timeout_s) if ended.ok else reply
        self._refuse_unless_ok(reply)

    def end_rollout(self, timeout_s: float = REJOIN_TIMEOUT_S) -> RolloutFigures:
        """Bring every rank back and give the step's figures. ServerRefused where none was begun."""
        return self._decoded(self._mark({"action": "end"}, timeout_s), RolloutFigures)

    def close(self) -> None:
        self._http.close()

    def _mark(self, body: Mapping[str, Any], timeout_s: float) -> requests.Response:
        """A server whose own patience ended before the ranks were back is asked again, until `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.001, deadline_s - time.monotonic())
            reply = self._call("POST", "/flexfloor/rollout", body, left_s)
            if reply.status_code != requests.codes.gateway_timeout or time.monotonic() >= deadline_s:
                return reply

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> requests.Response:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        try:
            return self._http.request(method, self.url + path, json=body, timeout=timeout)
        except requests.Timeout as error:
            raise DeadlineExceeded(f"{method} {self.url}{path}: no answer within {timeout:g} s") from error
        except requests.RequestException as error:
            raise ServerRefused(f"{method} {self.url}{path}: {error}") from error

    def _decoded(self, reply: requests.Response, kind: type[_T]) -> _T:
        self._refuse_unless_ok(reply)
        try:
            return msgspec.json.decode(reply.content, type=kind)
        except msgspec.MsgspecError as error:
            raise ServerRefused(
                f"{reply.request.method} {reply.url}: not the answer of this FlexFloor: {error}. "
                "Fix: install the same version of flexfloor in the driver and in the server"
            ) from error

    def _refuse_unless_ok(self, reply: requests.Response) -> None:
        if reply.ok:
            return
        text = f"{reply.request.method} {reply.url}: {reply.status_code} {_reason(reply)}"
        if reply.status_code in (requests.codes.unauthorized, requests.codes.forbidden):
            text += ". Fix: give the server's admin key, or the folder of its token (--flexfloor-folder)"
        raise ServerRefused(text)


def read_token(folder: str | Path) -> str:
    """The token that a server keeps in its `--flexfloor-folder`. Raises ValueError or OSError."""
    from flexfloor.membership.endpoint import Endpoint

    return Endpoint.read(folder).token


def _reason(reply: requests.Response) -> str:
    try:
        body = msgspec.json.decode(reply.content)
    except msgspec.MsgspecError:
        return reply.text[:200]
    for name in ("reason", "detail", "error"):
        if isinstance(body, dict) and name in body:
            return str(body[name])
    return str(body)[:200]
