"""Rules for addresses that a config names. Nothing here opens a connection."""

from urllib.parse import SplitResult, urlsplit

from flexfloor.config.checks import require

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
