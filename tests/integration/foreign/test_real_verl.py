"""verl itself makes our router and its client calls it. Needs verl and ray, which CI does not install:

pip install verl==0.9.1 && pytest tests/integration/foreign/test_real_verl.py
"""

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("verl", "ray") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' AND '.join(MISSING).upper()} NOT INSTALLED: only verl's record was checked"
)
CLASS = "flexfloor.integrations.verl_router.FlexfloorRouter"
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "router.yaml"
    file.write_text(f"router_class: {CLASS}\npoll_s: 0\nranks_per_replica: 4\n")
    return str(file)


def test_verl_makes_the_router_from_its_yaml(ray: Any, config: str) -> None:
    from verl.workers.rollout.router import get_router_handle

    router = get_router_handle({"host:1": "one"}, router_config_path=config)
    taken = ray.get(router.acquire_server.remote(request_id="r"), timeout=DEADLINE_S)
    assert taken == ("host:1", "one")
    status = ray.get(router.get_status.remote(), timeout=DEADLINE_S)
    assert (status["servers"], status["num_routed"]) == ({"host:1": 1}, {"host:1": 4})


def test_a_misspelt_key_does_not_make_a_router(ray: Any, config: str) -> None:
    from verl.workers.rollout.router import get_router_handle

    Path(config).write_text(f"router_class: {CLASS}\npol_s: 0\n")
    router = get_router_handle({}, router_config_path=config)
    with pytest.raises(ray.exceptions.RayActorError, match="pol_s: no such key"):
        ray.get(router.get_status.remote(), timeout=DEADLINE_S)


def test_verl_refuses_hydra_defaults(ray: Any, config: str) -> None:
    from verl.workers.rollout.router import get_router_handle

    Path(config).write_text(f"defaults: [base]\nrouter_class: {CLASS}\n")
    with pytest.raises(ValueError, match="defaults"):
        get_router_handle({}, router_config_path=config)


def test_verls_client_goes_through_the_router(ray: Any, config: str) -> None:
    """And gives the request back in the end, whatever came of it."""
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    class Server:
        async def generate(self, request_id: str, prompt_ids: list[int], **_more: Any) -> Any:
            from verl.workers.rollout.replica import TokenOutput

            if not prompt_ids:
                raise ValueError("an empty prompt")
            return TokenOutput(
                token_ids=[*prompt_ids, 7], stop_reason="stop", extra_fields={"global_steps": 1}
            )

    servers = {"host:1": ray.remote(Server).remote(), "host:2": ray.remote(Server).remote()}
    router = get_router_handle(servers, router_config_path=config)
    client = LLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}}), router)

    async def generate(prompts: list[list[int]]) -> list[Any]:
        calls = [
            client.generate(f"r{number}", prompt_ids=ids, sampling_params={})
            for number, ids in enumerate(prompts)
        ]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE_S)

    outputs = asyncio.run(generate([[1], [2], []]))
    assert [output.token_ids for output in outputs[:2]] == [[1, 7], [2, 7]]
    assert "an empty prompt" in str(outputs[2])
    # Releases are sent without waiting, in order before this call by the same process.
    assert ray.get(router.get_total_inflight.remote(), timeout=DEADLINE_S) == 0


def test_an_empty_pool_reads_as_verls_client_expects(ray: Any, config: str) -> None:
    from verl.workers.rollout.router import get_router_handle

    router = get_router_handle({}, router_config_path=config)
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        ray.get(router.acquire_server.remote(request_id="r"), timeout=DEADLINE_S)
