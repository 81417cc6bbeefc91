"""What verl asks of a router, and what it uses of SGLang, read from its sources."""

import ast

from tests.contracts import Facts
from tests.contracts.sources import Sources, dict_keys, imported, methods, signature_of, strings

_ROUTER = "verl/workers/rollout/router.py"
_CLIENT = "verl/workers/rollout/llm_server.py"
_SERVER = "verl/workers/rollout/sglang_rollout/async_sglang_server.py"
_ROLLOUT = "verl/workers/rollout/sglang_rollout/sglang_rollout.py"
_ENGINE = "sglang.srt.entrypoints.engine"


def read(sources: Sources) -> Facts:
    """Raises FileNotFoundError or LookupError naming what is gone."""
    protocol = sources.find(_ROUTER, "RequestLoadBalancer")
    assert isinstance(protocol, ast.ClassDef)
    launch = sources.find(_SERVER, "SGLangHttpServer.launch_server")
    return {
        "version": sources.text("verl/version/version").strip(),
        "protocol": {method.name: signature_of(method.args) for method in methods(protocol)},
        "plugin_arguments": _plugin_arguments(sources),
        "yaml": sorted(strings(sources.find(_ROUTER, "_create_plugin_extension")) & {"router_class"}),
        "refused_yaml": sorted(strings(sources.find(_ROUTER, "_load_router_yaml")) & {"defaults"}),
        "status_keys": dict_keys(sources.find(_ROUTER, "GlobalRequestLoadBalancer.get_status")),
        "cleared_keys": _returned_keys(sources, "GlobalRequestLoadBalancer.clear_sticky_cache"),
        "empty_pool": _empty_pool(sources),
        "acquire_fields": _keywords_of_call(
            sources.find(_CLIENT, "LLMServerClient.generate"), "_acquire_server"
        ),
        "release_fields": dict_keys(sources.find(_CLIENT, "LLMServerClient._release_server")),
        "retried_stop_reasons": sorted(
            strings(sources.find(_CLIENT, "FullyAsyncLLMServerClient.generate")) & {"abort", "aborted"}
        ),
        "request_fields": _request_fields(sources),
        "server_args": dict_keys(launch),
        "launch_keywords": _launch_keywords(launch),
        "opens_weight_sessions": "begin_weight_update" in sources.text(_SERVER) + sources.text(_ROLLOUT),
        "engine_attributes": _engine_attributes(launch),
        "sglang_imports": sorted(
            {*imported(sources.tree(_SERVER), "sglang"), *imported(sources.tree(_ROLLOUT), "sglang")}
        ),
    }


def _plugin_arguments(sources: Sources) -> list[str]:
    """How the router is made: `cls.remote(servers, yaml_config)`."""
    for node in ast.walk(sources.find(_ROUTER, "_create_plugin_extension")):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            return [ast.unparse(argument) for argument in node.value.args]
    raise LookupError(f"{_ROUTER}: _create_plugin_extension makes no router")


def _returned_keys(sources: Sources, dotted: str) -> list[str]:
    for node in ast.walk(sources.find(_ROUTER, dotted)):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            return dict_keys(node.value)
    raise LookupError(f"{_ROUTER}: {dotted} returns no dict")


def _empty_pool(sources: Sources) -> str:
    """The words that the asynchronous client waits on."""
    found = [text for text in strings(sources.tree(_CLIENT)) if text.startswith("No available servers")]
    if len(found) != 1:
        raise LookupError(f"{_CLIENT}: no single text for an empty pool: {found}")
    return found[0]


def _keywords_of_call(node: ast.AST, name: str) -> list[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == name:
            return sorted(keyword.arg for keyword in one.keywords if keyword.arg)
    raise LookupError(f"no call of {name}")


def _request_fields(sources: Sources) -> list[str]:
    """What verl sends to the engine with each request."""
    for node in ast.walk(sources.find(_SERVER, "SGLangHttpServer.generate")):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = dict_keys(node.value)
            if "rid" in keys:
                return keys
    raise LookupError(f"{_SERVER}: generate makes no request")


def _launch_keywords(launch: ast.AST) -> list[str]:
    calls = [
        [keyword.arg for keyword in node.keywords if keyword.arg]
        for node in ast.walk(launch)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Engine._launch_subprocesses"
    ]
    if len(calls) != 1:
        raise LookupError(f"{_SERVER}: not one call of Engine._launch_subprocesses")
    return calls[0]


def _engine_attributes(launch: ast.AST) -> list[str]:
    texts = {ast.unparse(node) for node in ast.walk(launch) if isinstance(node, ast.Attribute)}
    return sorted(text.removeprefix(f"{_ENGINE}.") for text in texts if text.startswith(f"{_ENGINE}."))
