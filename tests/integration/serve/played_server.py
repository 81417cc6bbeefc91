"""The server's main process without SGLang: real routes, manager and sockets; ranks and requests are played.

The ranks' loops are turned by a thread, so a release ends as it does in a server: when its ranks are drained.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.manager import Manager
from sglang_patches import CONFIG_ENV, plugin_config
from sglang_patches.plugin_config import PluginConfig
from sglang_patches.server_side import ServerSide

sys.path.append(str(Path(__file__).parents[1] / "membership"))

from fleet import Fleet

NUM_RANKS = 4


class PlayedRanks(Fleet):
    """Turns its ranks in a thread, for a manager that somebody else started."""

    def __init__(self, endpoint: Endpoint, manager: Manager) -> None:
        super().__init__(endpoint, NUM_RANKS)
        self.manager.close()
        self.manager = manager
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._turn_on)

    def __enter__(self) -> "PlayedRanks":
        for rank in self.ranks:
            rank.link.start()
        self._thread.start()
        self.manager.wait_ready(20)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        super().__exit__(*error)

    def _turn_on(self) -> None:
        while not self._is_over.wait(0.002):
            self.turn()


class PlayedTokenizerManager:
    """What the server side asks of SGLang's."""

    def __init__(self) -> None:
        self.event_loop = None
        self.gracefully_exit = False
        self.rid_to_state: dict[str, Any] = {}
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_experts=8))
        self.iterations = dict.fromkeys(range(NUM_RANKS), 0)
        self.load_snapshot_reader = SimpleNamespace(read_all=self._loads)
        self.answers = True

    def config_value(self, name: str) -> str:
        return {"weight_version": "7"}[name]

    def update_active_ranks(self, message: Any) -> None:
        raise AssertionError("there is no event loop")

    async def get_internal_state(self) -> list[dict[str, Any]]:
        if not self.answers:
            raise TimeoutError
        rows = [{"dp_rank": rank, "num_iterations": num} for rank, num in self.iterations.items()]
        return [{"flexfloor": row} for row in rows]

    def _loads(self) -> list[Any]:
        return [
            SimpleNamespace(
                dp_rank=rank, num_running_reqs=1 if rank == NUM_RANKS - 1 else 0, num_waiting_reqs=0
            )
            for rank in range(NUM_RANKS)
        ]


class PlayedServer:
    """One server and a client of it."""

    def __init__(self, side: ServerSide, client: TestClient, token: str) -> None:
        self.side = side
        self.client = client
        self.token = token
        self.tokenizer_manager: PlayedTokenizerManager = side._tokenizer_manager
        self.ranks: list[Any] = []
        self.authorization = f"Bearer {token}"

    def get(self, path: str, **headers: str) -> Any:
        return self.client.get(f"/flexfloor/{path}", headers={"Authorization": self.authorization, **headers})

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": self.authorization}
        answer = self.client.post(f"/flexfloor/{path}", json=body, headers=headers)
        return answer.status_code, answer.json()

    def members(self) -> list[int]:
        members: list[int] = self.get("membership").json()["members"]
        return members


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


@contextmanager
def play_server(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    root_path: str = "",
    **config: Any,
) -> Iterator[PlayedServer]:
    endpoint = Endpoint.local(folder / "m")
    path = folder / "plugin.json"
    chosen = PluginConfig(device="cpu", folder=str(folder / "m"), **config)
    path.write_text(plugin_config.dump(chosen))
    monkeypatch.setenv(CONFIG_ENV, str(path))
    serving = SimpleNamespace(
        api_key=api_key, admin_api_key=admin_api_key, fastapi_root_path=root_path, tokenizer_worker_num=1
    )
    stand_in(
        monkeypatch,
        "sglang.srt.runtime_context",
        get_parallel=lambda: SimpleNamespace(tp_size=NUM_RANKS, ep_size=NUM_RANKS),
        get_serving=lambda: serving,
        get_observability=lambda: SimpleNamespace(enable_metrics=False),
    )
    stand_in(monkeypatch, "sglang.srt.constants", HEALTH_CHECK_RID_PREFIX="HEALTH_CHECK")
    side = ServerSide(PlayedTokenizerManager(), chosen)
    app = FastAPI()
    side.serve(app)
    with TestClient(app, raise_server_exceptions=False) as client:
        server = PlayedServer(side, client, endpoint.token)
        if isinstance(side.group, Manager):
            with PlayedRanks(endpoint, side.group) as ranks:
                server.ranks = ranks.ranks
                yield server
        else:
            yield server
