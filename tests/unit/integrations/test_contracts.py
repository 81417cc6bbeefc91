"""Our router and our functions against what verl and slime promise, recorded and, where installed, real."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexfloor.integrations import slime_rollout
from flexfloor.integrations.replicas import NO_SERVERS
from flexfloor.integrations.verl_router import FlexfloorRouter
from sglang_patches import used_names, verify
from tests.contracts import recorded, slime_facts, verl_facts
from tests.contracts.sources import Sources, signature_of

ROOT = Path(__file__).parents[3]
STAND_IN = ROOT / "tests" / "contracts" / "stand_in"
VERL = recorded("verl-0.9.1")
SLIME = recorded("slime-624b824a8")
SGLANG = "sglang.srt.entrypoints.engine"


@pytest.fixture
def router() -> FlexfloorRouter:
    return FlexfloorRouter({"host:1": "one", "host:2": "two"}, {"router_class": "x", "poll_s": 0})


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_foreign", ROOT / "scripts" / "check_foreign.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", VERL["protocol"])
def test_the_router_can_be_called_as_verls_protocol_says(name: str) -> None:
    """The same names in the same order; a default may be more than the protocol has."""
    own = list(inspect.signature(getattr(FlexfloorRouter, name)).parameters.values())
    wanted = [parameter.partition("=")[0] for parameter in VERL["protocol"][name]]
    assert [one.name for one in own if one.kind is one.POSITIONAL_OR_KEYWORD] == [
        parameter for parameter in wanted if not parameter.startswith("*")
    ]
    assert any(one.kind is one.VAR_KEYWORD for one in own) == any(p.startswith("**") for p in wanted)
    without_default = {p for p in VERL["protocol"][name] if "=" not in p and not p.startswith("*")}
    assert {one.name for one in own if one.default is one.empty} >= without_default


def test_the_router_is_made_as_verl_makes_a_plugin() -> None:
    assert VERL["plugin_arguments"] == ["servers", "yaml_config"]
    assert list(inspect.signature(FlexfloorRouter).parameters) == ["servers", "config"]
    # The whole YAML file comes, the class's own name in it.
    assert VERL["yaml"] == ["router_class"]
    FlexfloorRouter({}, {"router_class": "flexfloor.integrations.verl_router.FlexfloorRouter", "poll_s": 0})


def test_the_router_asks_for_fields_that_verl_has(router: FlexfloorRouter) -> None:
    assert set(router.require_acquire_fields()) <= set(VERL["acquire_fields"])
    assert set(router.require_release_fields()) <= set(VERL["release_fields"])
    server_id, handle = router.acquire_server(request_id="r", **dict.fromkeys(VERL["acquire_fields"]))
    assert (server_id, handle) == ("host:1", "one")


def test_status_and_cleared_keys_are_verls(router: FlexfloorRouter) -> None:
    router.acquire_server("r")
    status = router.get_status()
    assert set(VERL["status_keys"]) <= set(status)
    assert status["servers"] == {"host:1": 1, "host:2": 0}
    assert (status["total_inflight"], status["active_servers"]) == (1, 2)
    assert router.get_total_inflight() == 1
    cleared = router.clear_sticky_cache()
    assert set(cleared) == set(VERL["cleared_keys"])
    assert cleared["cleared_entries"] == 1


def test_an_empty_pool_says_the_words_that_verl_waits_on(router: FlexfloorRouter) -> None:
    assert VERL["empty_pool"] == NO_SERVERS
    router.remove_servers(router.get_all_servers())
    with pytest.raises(RuntimeError, match=VERL["empty_pool"]):
        router.acquire_server("r")
    router.release_server("host:1", request_id="r")
    router.add_servers({"host:3": "three"})
    assert router.acquire_server("r") == ("host:3", "three")


def test_a_lost_rank_is_what_verls_client_continues() -> None:
    """SGLang's finish_reason.type becomes verl's stop_reason; FlexFloor aborts what a lost rank had."""
    assert "abort" in VERL["retried_stop_reasons"]
    assert "routed_dp_rank" not in VERL["request_fields"], (
        "verl names a rank now: the router could choose one"
    )


@pytest.mark.parametrize("config", [{"pol_s": 1}, {"poll_s": -1}, {"max_requests_per_rank": 0}])
def test_a_key_or_value_that_cannot_be_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        FlexfloorRouter({}, {"router_class": "x", "poll_s": 0, **config})


def test_verl_does_not_open_the_weight_sessions_that_the_installed_sglang_wants() -> None:
    """Besides the pin to SGLang 0.5.12 this keeps them apart: its weight updates would be refused."""
    assert VERL["opens_weight_sessions"] is False
    updater = "sglang/srt/managers/scheduler_components/weight_updater.py"
    assert "begin_weight_update() and end_weight_update()" in Sources(verify.installed_root()).text(updater)


def test_what_verl_names_of_sglang_is_in_the_installed_one() -> None:
    root = verify.installed_root()
    missing = [name for name in VERL["sglang_imports"] if not used_names.has_name(root, *name.split(":"))]
    assert missing == [
        # verl's branch for SGLang before 0.5.10.
        "sglang.srt.entrypoints.http_server:_launch_subprocesses",
        # Only with rollout.enable_rollout_routing_replay.
        "sglang.srt.layers.moe.routed_experts_capturer:extract_routed_experts_from_meta_info",
        # verl looks in the next place, which is there.
        "sglang.srt.model_executor.model_runner:LocalSerializedTensor",
    ]
    assert all(used_names.has_name(root, SGLANG, name) for name in VERL["engine_attributes"])
    launch = Sources(root).signature("sglang/srt/entrypoints/engine.py", "Engine._launch_subprocesses")
    assert set(VERL["launch_keywords"]) <= {parameter.partition("=")[0] for parameter in launch}


def test_verls_server_arguments_are_fields_of_the_installed_sglang() -> None:
    folder = verify.installed_root() / "sglang" / "srt"
    files = [folder / "server_args.py", *(folder / "arg_groups" / "fields").glob("*.py")]
    known = {
        line.strip().partition(":")[0]
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("    ") and not line.startswith("     ") and ":" in line
    }
    ours = {"enable_dp_attention", "enable_dp_lm_head", "moe_dense_tp_size"}
    assert {*VERL["server_args"], *ours} - known == set()


@pytest.mark.parametrize(
    ("name", "record"), [("generate_rollout", "generate_rollout"), ("generate", "generate")]
)
def test_our_functions_have_slimes_signatures(name: str, record: str) -> None:
    parameters = list(inspect.signature(getattr(slime_rollout, name)).parameters.values())
    texts = [one.name if one.default is one.empty else f"{one.name}={one.default}" for one in parameters]
    assert texts[: len(SLIME[record])] == SLIME[record]
    assert all(one.default is not one.empty for one in parameters[len(SLIME[record]) :])
    if name == "generate":
        assert [one.name for one in parameters[len(SLIME[record]) :]] == SLIME["custom_generate_keyword"]


def test_the_stand_in_for_slime_is_what_was_recorded() -> None:
    found = slime_facts.read(Sources(STAND_IN))
    assert found == {name: SLIME[name] for name in found}
    assert set(SLIME) - set(found) == {"package", "read_from"}


def test_a_difference_is_shown(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in STAND_IN.rglob("*.py"):
        copy = tmp_path / file.relative_to(STAND_IN)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            file.read_text().replace("def generate_rollout(args, rollout_id,", "def generate_rollout(args,")
        )
    assert script.main(["slime", str(STAND_IN)]) == 0
    assert script.main(["slime", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "differs   generate_rollout" in shown
    assert shown.splitlines()[-1] == "slime: 14 facts, 1 to look at"
    (tmp_path / "slime" / "utils" / "types.py").unlink()
    assert script.main(["slime", str(tmp_path)]) == 1
    assert "has no slime/utils/types.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "read", "record"),
    [("verl", verl_facts.read, VERL), ("slime", slime_facts.read, SLIME)],
    ids=["verl", "slime"],
)
def test_the_installed_package_is_what_was_recorded(package: str, read: Any, record: dict[str, Any]) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} IS NOT INSTALLED: only its record was checked; see scripts/check_foreign.py")
    found = read(Sources(Path(next(iter(spec.submodule_search_locations))).parent))
    assert found == {name: record[name] for name in found}


def test_signatures_are_read_with_every_kind_of_parameter() -> None:
    import ast

    function = ast.parse("def f(a, b=1, *rest, c, d=None, **more): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert signature_of(function.args) == ["a", "b=1", "*rest", "c", "d=None", "**more"]


def test_loading_our_modules_loads_nothing_foreign() -> None:
    assert not {"verl", "ray", "slime"} & set(sys.modules)
