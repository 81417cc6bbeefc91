"""Which replica takes a request."""

import pytest

from flexfloor.integrations.replicas import NO_SERVERS, NoReplica, ReplicaPool


def pool(*server_ids: str, **config: int) -> ReplicaPool:
    made = ReplicaPool(**config)
    made.add(server_ids)
    return made


def take(made: ReplicaPool, num_requests: int, prefix: str = "r") -> list[str]:
    return [made.acquire(f"{prefix}{number}") for number in range(num_requests)]


def test_requests_spread_evenly() -> None:
    made = pool("a", "b", "c")
    take(made, 9)
    assert made.inflight == {"a": 3, "b": 3, "c": 3}


def test_a_replica_that_gives_ranks_back_gets_less() -> None:
    made = pool("a", "b", num_ranks=4)
    made.acquire("first")
    made.set_membership("a", num_ranks=4, num_routed=1)
    take(made, 9)
    assert made.inflight == {"a": 2, "b": 8}


def test_when_nothing_runs_every_rank_counts_again() -> None:
    made = pool("a", "b", num_ranks=4)
    server_id = made.acquire("straggler")
    made.set_membership("a", num_ranks=4, num_routed=1)
    made.set_membership("b", num_ranks=4, num_routed=2)
    assert made.num_routed == {"a": 1, "b": 2}
    made.release(server_id)
    assert made.num_routed == {"a": 4, "b": 4}
    # Heard between two steps, of a server that has no work: the next step begins with all of them.
    made.set_membership("a", num_ranks=4, num_routed=1)
    take(made, 8)
    assert made.inflight == {"a": 4, "b": 4}


def test_a_conversation_stays_on_its_replica() -> None:
    made = pool("a", "b")
    first = made.acquire("conversation")
    made.release(first)
    take(made, 5)
    assert made.acquire("conversation") == first
    assert made.clear_sticky() == 6
    assert made.clear_sticky() == 0


def test_a_conversation_whose_replica_is_gone_moves() -> None:
    made = pool("a", "b")
    assert made.acquire("conversation") == "a"
    made.remove(["a"])
    assert made.acquire("conversation") == "b"


def test_old_conversations_are_forgotten() -> None:
    made = pool("a", max_sticky=3)
    take(made, 5)
    assert made.clear_sticky() == 3


def test_full_replicas_first() -> None:
    made = pool("a", "b", "c", num_ranks=2, max_requests_per_rank=3)
    assert take(made, 8) == ["a"] * 6 + ["b"] * 2
    # Over the limit everywhere: the least loaded one.
    take(made, 10, "s")
    assert made.inflight == {"a": 6, "b": 6, "c": 6}
    assert made.acquire("more") == "a"
    assert made.acquire("and more") == "b"


def test_an_empty_pool_says_what_verls_client_waits_for() -> None:
    made = pool("a")
    made.remove(["a", "never there"])
    with pytest.raises(NoReplica, match=NO_SERVERS):
        made.acquire("r")
    assert issubclass(NoReplica, RuntimeError)


def test_releases_that_come_late_or_twice_do_nothing() -> None:
    made = pool("a", "b")
    server_id = made.acquire("r")
    made.release(server_id)
    made.release(server_id)
    assert made.inflight == {"a": 0, "b": 0}
    made.remove(["a"])
    made.release("a")
    made.set_membership("a", num_ranks=4, num_routed=4)
    assert made.server_ids == ["b"]
    made.add(["a"])
    assert made.inflight == {"b": 0, "a": 0}


@pytest.mark.parametrize("config", [{"max_requests_per_rank": 0}, {"num_ranks": 0}])
def test_a_number_that_cannot_be_is_named(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(config))}=0"):
        ReplicaPool(**config)
