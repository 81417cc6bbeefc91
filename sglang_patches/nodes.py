"""A server over several nodes: where its membership manager listens, and how the nodes find each other.

    node 0      writes FOLDER/endpoint.json, then starts SGLang; its main process hosts manager and store
    other nodes wait for that file, then start SGLang; their ranks check that it is node 0's newest

PORT of `--flexfloor-bind tcp://HOST:PORT` is the manager's, PORT + 1 the store's. Rank 0 and the manager live
on node 0, so its ranks may park, but the node itself cannot be given back.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership.endpoint import Endpoint

UNIX = "unix"
MAX_PORT = 65534
"""The store has the one above."""
ENDPOINT_TIMEOUT_S = 600.0
"""Nodes of one job start together; a container image may take its time on one of them."""
SGLANG_PORTS = (*range(7), 13)
"""What SGLang takes on node 0, counted from the port of --dist-init-addr."""
_WILDCARDS = ("*", "0.0.0.0", "::")


def parse_bind(text: str) -> tuple[str, int] | None:
    """(host, port) of a tcp address, None for a unix socket. Raises ValueError saying what is wrong."""
    if text == UNIX:
        return None
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:  # not a number, or above 65535
        port = None
    if parts.scheme != "tcp" or not parts.hostname or parts.path or parts.query:
        raise ValueError("neither unix nor tcp://HOST:PORT")
    if port is None or not 1 <= port <= MAX_PORT:
        raise ValueError(f"the port must be a number of 1 to {MAX_PORT}")
    if parts.hostname in _WILDCARDS:
        raise ValueError("the other nodes connect to this address, so it must name node 0")
    return parts.hostname, port


def clash_of(bind: str, dist_init_addr: str | None) -> str:
    """Why the manager's ports are SGLang's own; empty when they are not."""
    found = parse_bind(bind)
    if found is None or not dist_init_addr:
        return ""
    text = dist_init_addr.rpartition(":")[2]
    if not text.isdecimal():
        return ""
    taken = {int(text) + offset for offset in SGLANG_PORTS}
    both = sorted({found[1], found[1] + 1} & taken)
    return f"SGLang takes port {both[0]} for --dist-init-addr {dist_init_addr}" if both else ""


def launch_name(dist_init_addr: str | None, num_nodes: int, environment: Mapping[str, str]) -> str:
    """What all nodes of one start know of it without asking, and another job's server does not share."""
    job = environment.get("SLURM_JOB_ID", "none")
    return f"dist_init_addr={dist_init_addr} nnodes={num_nodes} slurm_job={job}"


def prepare_endpoint(folder: str, bind: str, *, launch: str, node_rank: int) -> None:
    """Leave a tcp endpoint in the folder, or wait until node 0 has. Raises ValueError, OSError."""
    address = parse_bind(bind)
    assert address is not None, "for tcp only"
    if node_rank == 0:
        Endpoint.tcp(*address, launch=launch).publish(folder)
        return
    try:
        Endpoint.wait(folder, launch=launch, timeout_s=ENDPOINT_TIMEOUT_S)
    except DeadlineExceeded as error:
        raise ValueError(str(error)) from error
