"""The server's main process: what stands still during a control call, and when routing is sent."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic_fakes import stand_in

from flexfloor.membership.endpoint import Endpoint
from sglang_patches import CONFIG_ENV, plugin_config
from sglang_patches.elastic import serving
from sglang_patches.elastic.serving import ServerMembership
from sglang_patches.plugin_config import PluginConfig


class FakeManager:
    """Grants every fence at once and keeps what it is told."""

    def __init__(self, endpoint: Endpoint, membership: Any, **callbacks: Callable[..., None]) -> None:
        self.endpoint = endpoint
        self.membership = membership
        self.on_routing = callbacks["on_routing"]
        self.journal: list[str] = []
        self.held: set[str] = set()
        self.refusal: str | None = None
        self.members = (0, 1, 2, 3)
        self.states = dict.fromkeys(range(4), "serving")
        self.num_fences = 0

    def start(self) -> None:
        self.journal.append("start")

    def fence(self, *, full: bool) -> "Future[str]":
        future: Future[str] = Future()
        if self.refusal:
            future.set_exception(RuntimeError(self.refusal))
            return future
        self.num_fences += 1
        name = f"f{self.num_fences}"
        self.held.add(name)
        self.journal.append(f"{name} full" if full else name)
        future.set_result(name)
        return future

    def unfence(self, fence_id: str) -> None:
        self.held.remove(fence_id)

    def status(self) -> Any:
        return SimpleNamespace(members=self.members, states=self.states)

    def weights_updated(self, version: str) -> None:
        self.journal.append(f"weights {version}")


class TokenizerManager:
    """`event_loop` is None until the first request, as in SGLang."""

    def __init__(self) -> None:
        self.event_loop: Any = None
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_experts=8))
        self.sent: list[list[bool]] = []

    def update_active_ranks(self, message: Any) -> None:
        self.sent.append(message.status)


class Loop:
    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call_soon_threadsafe(self, function: Callable[..., None], *args: Any) -> None:
        self.calls.append((function, args))

    def run(self) -> None:
        for function, args in self.calls:
            function(*args)
        self.calls.clear()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServerMembership:
    Endpoint.local(tmp_path / "m")
    path = tmp_path / "plugin.json"
    config = PluginConfig(device="cpu", membership="elastic", floor=2, folder=str(tmp_path / "m"))
    path.write_text(plugin_config.dump(config))
    monkeypatch.setenv(CONFIG_ENV, str(path))
    monkeypatch.setattr(serving, "Manager", FakeManager)
    stand_in(monkeypatch, "sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(tp_size=4))
    stand_in(monkeypatch, "sglang.srt.managers.io_struct", ActiveRanksOutput=SimpleNamespace)
    return ServerMembership(TokenizerManager())


def call(server: ServerMembership, name: str, *, fails: bool = False) -> int:
    """A control call of this type; returns how many ranks it waits for."""

    async def inside() -> int:
        async with server.fence(name) as num_ranks:
            if fails:
                raise TimeoutError("a rank did not answer")
            return num_ranks

    return asyncio.run(inside())


def test_the_manager_starts_with_the_servers_group(server: ServerMembership) -> None:
    membership = server.manager.membership
    assert (membership.ep_size, membership.floor, membership.placement.num_experts) == (4, 2, 8)
    assert server.manager.journal == ["start"]


def test_a_call_waits_for_the_ranks_that_are_in_the_group(server: ServerMembership) -> None:
    server.manager.members = (0, 2)
    assert call(server, "GetInternalStateReq") == 2
    assert server.manager.journal == ["start", "f1"]
    assert server.manager.held == set()


@pytest.mark.parametrize(
    "name", ["UpdateWeightFromDiskReqInput", "BeginWeightUpdateReqInput", "PauseGenerationReqInput"]
)
def test_what_every_rank_must_see_asks_for_the_full_group(server: ServerMembership, name: str) -> None:
    assert call(server, name) == 4
    assert server.manager.journal == ["start", "f1 full"]


@pytest.mark.parametrize("name", ["GetInternalStateReq", "UpdateWeightsFromTensorReqInput"])
def test_a_call_that_fails_lets_go_all_the_same(server: ServerMembership, name: str) -> None:
    with pytest.raises(TimeoutError):
        call(server, name, fails=True)
    assert server.manager.held == set()


PAIRS = [
    ("BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"),
    ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"),
    ("PauseGenerationReqInput", "ContinueGenerationReqInput"),
]


@pytest.mark.parametrize(("first", "last"), PAIRS)
def test_nothing_changes_between_a_call_and_its_counterpart(
    server: ServerMembership, first: str, last: str
) -> None:
    held = server.manager.held
    call(server, first)
    assert held == {"f1"}
    call(server, "UpdateWeightsFromTensorReqInput")
    call(server, first)
    assert held == {"f1"}
    call(server, last)
    assert held == set()
    call(server, last)
    assert held == set()
    call(server, first)
    assert held == {"f6"}


def test_pairs_do_not_end_each_other(server: ServerMembership) -> None:
    for first, _ in PAIRS:
        call(server, first)
    call(server, "ContinueGenerationReqInput")
    assert server.manager.held == {"f1", "f2"}


@pytest.mark.parametrize("name", ["BeginWeightUpdateReqInput", "UpdateWeightFromDiskReqInput"])
def test_weights_that_a_rank_gone_for_good_would_miss_are_refused_and_hold_nothing(
    server: ServerMembership, name: str
) -> None:
    server.manager.states |= {1: "exited", 3: "lost"}
    with pytest.raises(RuntimeError, match=rf"{name}: ep_rank 1, 3 has left for good.*Fix: restart"):
        call(server, name)
    assert server.manager.held == set()
    server.manager.members = (0, 2)
    assert call(server, "GetInternalStateReq") == 2


def test_a_fence_that_the_manager_refuses_ends_the_call_with_its_reason(server: ServerMembership) -> None:
    server.manager.refusal = "ep_rank 2 was lost"
    with pytest.raises(RuntimeError, match="ep_rank 2 was lost"):
        call(server, "BeginWeightUpdateReqInput")
    server.manager.refusal = None
    call(server, "GetInternalStateReq")
    assert server.manager.held == set()


def test_a_new_version_is_told_as_text(server: ServerMembership) -> None:
    server.record_weights(None)
    server.record_weights(7)
    server.record_weights("step-8")
    assert server.manager.journal == ["start", "weights 7", "weights step-8"]


def test_routing_from_before_the_event_loop_is_sent_once_when_it_runs(server: ServerMembership) -> None:
    tokenizer = server._tokenizer_manager
    server.loop_started()
    assert tokenizer.sent == []
    server.manager.on_routing((0, 1, 2), (0, 1, 2, 3))
    server.manager.on_routing((0, 2), (0, 1, 2))
    tokenizer.event_loop = Loop()
    server.loop_started()
    server.loop_started()
    assert tokenizer.sent == [[True, False, True, False, True, True, True, False]]


def test_later_routing_goes_through_the_event_loop_in_order(server: ServerMembership) -> None:
    tokenizer = server._tokenizer_manager
    tokenizer.event_loop = Loop()
    server.manager.on_routing((0, 1), (0, 1))
    server.manager.on_routing((0, 1, 2, 3), (0, 1, 2, 3))
    assert tokenizer.sent == []
    tokenizer.event_loop.run()
    assert tokenizer.sent == [[True, True, False, False] * 2, [True] * 8]
