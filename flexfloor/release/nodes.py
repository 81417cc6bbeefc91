"""Which nodes have become free. PURE."""

from collections.abc import Collection, Mapping


def may_be_given_back(ep_rank: int, nodes: Mapping[int, str]) -> bool:
    """Whether the rank's node may leave the job: the one of rank 0 holds the server itself."""
    return nodes[ep_rank] != nodes[0]


def free_nodes(nodes: Mapping[int, str], exited: Collection[int]) -> tuple[str, ...]:
    """Nodes all of whose ranks have exited, in the order of their ranks; never that of rank 0.

    `nodes`: ep_rank -> machine, of all ranks of the server.
    """
    ranks_on: dict[str, set[int]] = {}
    for ep_rank, node in sorted(nodes.items()):
        ranks_on.setdefault(node, set()).add(ep_rank)
    return tuple(node for node, ranks in ranks_on.items() if 0 not in ranks and ranks <= set(exited))


def without(job_nodes: Collection[str], node: str) -> tuple[str, ...]:
    """The job's nodes once this one has left. Raises ValueError where it is none of them, or the last."""
    left = tuple(name for name in job_nodes if name != node)
    if len(left) == len(job_nodes):
        raise ValueError(f"node {node} is not among the job's nodes {', '.join(job_nodes)}")
    if not left:
        raise ValueError(f"node {node} is the job's last one")
    return left
