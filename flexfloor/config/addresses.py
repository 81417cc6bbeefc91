"""Rules for addresses that a config names. Nothing here opens a connection."""

from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from flexfloor.config.checks import require


class Attachments(Protocol):
    """The part of `ClusterConfig` that says what runs already."""

    server_url: str | None
    trainer_endpoint: str | None
    trainer_keys: str | None
    iteration_log: str | None


_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def check_server_url(url: str | None) -> None:
    fix = "set cluster.server_url=http://HOST:PORT, or null to start a server here"
    holds = url is None or _is_address(url, ("http", "https"), port_needed=False)
    require(holds, "cluster.server_url", url, "is not an http address", fix)


def check_trainer_endpoint(endpoint: str | None) -> None:
    fix = "set cluster.trainer_endpoint=tcp://HOST:PORT or ipc://PATH, or null to start a trainer here"
    is_ipc = endpoint is not None and endpoint.startswith("ipc://") and len(endpoint) > len("ipc://")
    holds = endpoint is None or is_ipc or _is_address(endpoint, ("tcp",), port_needed=True)
    require(holds, "cluster.trainer_endpoint", endpoint, "is not a ZeroMQ endpoint", fix)


def check_attachments(cluster: "Attachments") -> None:
    """What describes a running server or trainer needs one to describe."""
    fix = "set cluster.server_url too, or leave it out: a run logs the server that it starts by itself"
    holds = cluster.iteration_log is None or cluster.server_url is not None
    require(holds, "cluster.iteration_log", cluster.iteration_log, "there is no server to attach to", fix)
    fix = "set cluster.trainer_endpoint=tcp://HOST:PORT too, or leave it out"
    is_tcp = (cluster.trainer_endpoint or "").startswith("tcp://")
    problem = "keys are for a trainer at a tcp endpoint"
    keys = cluster.trainer_keys
    require(keys is None or is_tcp, "cluster.trainer_keys", keys, problem, fix)


def host_of(address: str | None) -> str:
    """Name of the machine behind an address; every way to say `this machine` reads `localhost`."""
    host = urlsplit(address).hostname if address and not address.startswith("ipc://") else None
    return "localhost" if host is None or host in _LOCAL_HOSTS else host


def _is_address(text: str, schemes: tuple[str, ...], port_needed: bool) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # a port that is no number, or an unclosed IPv6 bracket
        return False
    return parts.scheme in schemes and _has_host_only(parts) and (port is not None or not port_needed)


def _has_host_only(parts: SplitResult) -> bool:
    return bool(parts.hostname) and parts.path in ("", "/") and not parts.query
