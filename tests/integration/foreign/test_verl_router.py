"""What the router hears from replicas, over real sockets."""

import threading
import time

from foreign_engine import FakeEngine, serving

from flexfloor.integrations.verl_router import FlexfloorRouter

DEADLINE_S = 30.0


def address(engine: FakeEngine) -> str:
    """As verl names a replica."""
    return engine.url.removeprefix("http://")


def test_a_shrinking_replica_gets_less_until_the_step_is_over() -> None:
    with serving(FakeEngine()) as small, serving(FakeEngine()) as full:
        router = FlexfloorRouter({address(small): 1, address(full): 2}, {"poll_s": 0, "ranks_per_replica": 4})
        straggler, _ = router.acquire_server("straggler")
        small.members = small.routed = [0]
        router.refresh()
        assert router.get_status()["num_routed"] == {address(small): 1, address(full): 4}
        taken = [router.acquire_server(f"r{number}")[0] for number in range(4)]
        assert taken == [address(full)] * 4
        for server_id in [straggler, *taken]:
            router.release_server(server_id)
        assert router.get_status()["num_routed"] == {address(small): 4, address(full): 4}


def test_replicas_without_routes_or_that_are_gone_count_as_configured() -> None:
    with serving(FakeEngine(has_routes=False)) as plain:
        config = {"poll_s": 0, "ranks_per_replica": 4}
        router = FlexfloorRouter({address(plain): 1, "127.0.0.1:1": 2}, config)
        router.acquire_server("r")
        router.refresh()
        assert router.get_status()["num_routed"] == {address(plain): 4, "127.0.0.1:1": 4}
        # It is not asked again, until a server of that name comes anew.
        assert router._without_routes == {address(plain)}
        router.add_servers({address(plain): 3})
        assert router._without_routes == set()


def test_the_router_asks_by_itself() -> None:
    with serving(FakeEngine(num_ranks=3)) as engine:
        router = FlexfloorRouter({address(engine): 1}, {"poll_s": 0.01})
        end_s = time.monotonic() + DEADLINE_S
        while router.get_status()["num_routed"] != {address(engine): 3}:
            assert time.monotonic() < end_s
            threading.Event().wait(0.01)
        thread = next(one for one in threading.enumerate() if one.name == "flexfloor-router")
        router.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
