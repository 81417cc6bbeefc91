"""The servers of a slime run during one rollout step: begun, placed on, ended with every rank back."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import requests

from flexfloor.errors import FlexfloorError
from flexfloor.integrations.server_control import (
    CALL_TIMEOUT_S,
    MembershipView,
    ServerControl,
    ServerRefused,
    read_token,
)
from flexfloor.integrations.slime_settings import SlimeSettings
from flexfloor.integrations.spread import Seat
from flexfloor.membership.status import RolloutFigures

logger = logging.getLogger(__name__)

_ADDED = {row.name for row in fields(RolloutFigures)} - {"wall_s", "membership_epoch"}


class Fleet:
    """All servers that slime's router knows. Each must be a `flexfloor-serve` with elastic membership."""

    def __init__(self, urls: Sequence[str], *, key: str | None, rejoin_timeout_s: float) -> None:
        if not urls:
            raise ServerRefused(
                "slime's router lists no server. Fix: start them, or set flexfloor_engine_urls"
            )
        self._rejoin_timeout_s = rejoin_timeout_s
        self._controls = [ServerControl(url, key=key) for url in urls]

    @classmethod
    def of(cls, args: Any, settings: SlimeSettings) -> "Fleet":
        """The servers of this run. ServerRefused, or ValueError for a token that cannot be read."""
        key = settings.admin_key
        if key is None and settings.folder is not None:
            key = read_token(settings.folder)
        urls = settings.engine_urls or router_urls(args.sglang_router_ip, args.sglang_router_port)
        return cls(urls, key=key, rejoin_timeout_s=settings.rejoin_timeout_s)

    @contextmanager
    def rollout(self, rollout_step: int) -> Iterator[dict[str, float]]:
        """Inside, ranks may leave. Afterwards every rank is back, also when the block failed.

        Gives a dict that holds the step's figures, summed over the servers, after the block.
        """
        figures: dict[str, float] = {}
        begun: list[ServerControl] = []
        try:
            for control in self._controls:
                control.begin_rollout(rollout_step, self._rejoin_timeout_s)
                begun.append(control)
            yield figures
        finally:
            self._end(begun, figures)

    def open_seats(self) -> list[Seat]:
        """Every rank of every server that gets new requests now. ServerRefused."""
        return [
            Seat(control.url, dp_rank) for control in self._controls for dp_rank in self._view(control).routed
        ]

    def close(self) -> None:
        for control in self._controls:
            control.close()

    def _view(self, control: ServerControl) -> MembershipView:
        view = control.membership()
        if view is None:
            raise ServerRefused(
                f"{control.url} has no /flexfloor routes. Fix: start it by flexfloor-serve "
                "--flexfloor-membership elastic, or take slime's own rollout function"
            )
        return view

    def _end(self, begun: Sequence[ServerControl], figures: dict[str, float]) -> None:
        """End all, then raise the first failure: one server's must not leave another one shrunk."""
        failures: list[FlexfloorError] = []
        for control in begun:
            try:
                _add(figures, control.end_rollout(self._rejoin_timeout_s))
                self._check_full(control)
            except FlexfloorError as error:
                logger.error("%s", error)
                failures.append(error)
        if failures:
            raise failures[0]

    def _check_full(self, control: ServerControl) -> None:
        view = self._view(control)
        if not view.is_full:
            away = sorted(set(range(view.ep_size)) - set(view.members))
            states = ", ".join(f"{rank} is {view.states.get(str(rank), 'unknown')}" for rank in away)
            raise ServerRefused(
                f"{control.url}: the step has ended and ep_rank {states}, so a weight update would not reach "
                "it. Fix: restart this server before the next update"
            )


def router_urls(host: str, port: int) -> tuple[str, ...]:
    """URLs of the servers behind SGLang's router. ServerRefused."""
    url = f"http://{host}:{port}/workers"
    try:
        with requests.Session() as http:
            http.trust_env = False
            reply = http.get(url, timeout=CALL_TIMEOUT_S)
        reply.raise_for_status()
        return tuple(str(worker["url"]) for worker in reply.json()["workers"])
    except (requests.RequestException, KeyError, TypeError, ValueError) as error:
        raise ServerRefused(
            f"GET {url}: {error}. Fix: check the router, or set flexfloor_engine_urls"
        ) from error


def _add(figures: dict[str, float], step: RolloutFigures) -> None:
    for name in _ADDED:
        key = f"flexfloor/{name}"
        value = getattr(step, name)
        if value is not None:
            figures[key] = figures.get(key, 0) + value
    figures["flexfloor/wall_s"] = max(figures.get("flexfloor/wall_s", 0.0), step.wall_s)
