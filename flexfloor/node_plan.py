"""What each node of a job runs: the server's and the trainer's command line of this node. PURE.

`flexfloor-prepare` writes a plan into the run directory, `flexfloor-node` on every node reads it. A plan says
where the server and the trainer are reached; who is which node is told at its start.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

PLAN_NAME = "node_plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    server_argv: list[str]
    """Of a server on one node."""
    server_ranks: int
    server_url: str
    is_elastic: bool
    trainer_spec: str
    """Path of the trainer's spec."""
    trainer_ranks: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node among those of a service."""

    num_nodes: int
    node_rank: int
    address: str
    """HOST:PORT of node 0 where the nodes meet; of no use on one node."""


def encode_plan(plan: NodePlan) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plan))


def decode_plan(text: bytes) -> NodePlan:
    """Raises msgspec.ValidationError for text that is no plan."""
    return msgspec.json.decode(text, type=NodePlan)


def server_argv_on(plan: NodePlan, place: Place, bind: str | None) -> list[str]:
    """The server's command line of one node.

    Args:
        bind: where the membership manager listens, `tcp://HOST:PORT` of node 0; needed when several nodes
            serve an elastic group.

    Raises:
        ValueError: the ranks do not divide by the nodes, or the nodes have nowhere to meet.
    """
    _check(place, plan.server_ranks, "the server's ranks (rollout.ep_size)")
    argv = list(plan.server_argv)
    if plan.is_elastic and bind is not None:
        argv += ["--flexfloor-bind", bind]
    if place.num_nodes == 1:
        return argv
    if plan.is_elastic and bind is None:
        raise ValueError("an elastic group on several nodes needs --bind tcp://HOST:PORT of node 0")
    # Only node 0 answers HTTP; a port of its own lets the nodes of a test share one host.
    port = urlsplit(plan.server_url).port or 30000
    argv[argv.index("--port") + 1] = str(port + place.node_rank)
    return [
        *argv,
        *("--nnodes", str(place.num_nodes), "--node-rank", str(place.node_rank)),
        *("--dist-init-addr", place.address),
    ]


def trainer_place(plan: NodePlan, place: Place) -> tuple[str, int] | tuple[None, None]:
    """Host and port where the trainer's nodes meet; None on one node. Raises ValueError."""
    _check(place, plan.trainer_ranks, "the trainer's ranks (trainer.num_ranks)")
    if place.num_nodes == 1:
        return None, None
    host, _, port = place.address.rpartition(":")
    return host, int(port)


def _check(place: Place, num_ranks: int, what: str) -> None:
    if num_ranks % place.num_nodes:
        raise ValueError(f"{what}, {num_ranks}, do not divide by {place.num_nodes} nodes")
    if not 0 <= place.node_rank < place.num_nodes:
        raise ValueError(f"--node-rank={place.node_rank}: there are {place.num_nodes} nodes, numbered from 0")
    host, _, port = place.address.rpartition(":")
    if place.num_nodes > 1 and not (host and port.isdecimal()):
        raise ValueError(f"--address={place.address!r}: several nodes need HOST:PORT of node 0 to meet at")
