"""What slime asks of a rollout function and a generate function, read from its sources."""

import ast

from tests.contracts import Facts
from tests.contracts.sources import Sources, fields, strings

_TYPES = "slime/utils/types.py"
_BASE = "slime/rollout/base_types.py"
_ROLLOUT = "slime/rollout/sglang_rollout.py"
_HTTP = "slime/utils/http_utils.py"
_CONTROL = "slime/backends/sglang_utils/server_control.py"

_SAMPLE_FIELDS = (
    "index", "prompt", "tokens", "multimodal_inputs", "response", "response_length", "label", "reward",
    "loss_mask", "weight_versions", "rollout_log_probs", "status", "metadata",
)  # fmt: skip


def read(sources: Sources) -> Facts:
    """Only what our functions use or give. Raises FileNotFoundError or LookupError naming what is gone."""
    sample = sources.find(_TYPES, "Sample")
    status = sources.find(_TYPES, "Sample.Status")
    assert isinstance(sample, ast.ClassDef)
    assert isinstance(status, ast.ClassDef)
    generate = strings(sources.find(_ROLLOUT, "generate"))
    return {
        "sample_fields": [name for name in _SAMPLE_FIELDS if name in fields(sample)],
        "statuses": _members(status),
        "append_response_tokens": sources.signature(_TYPES, "Sample.append_response_tokens"),
        "train_output": _fields(sources, "RolloutFnTrainOutput"),
        "eval_output": _fields(sources, "RolloutFnEvalOutput"),
        "call_rollout_fn": sources.signature(_BASE, "call_rollout_fn"),
        "generate_rollout": sources.signature(_ROLLOUT, "generate_rollout"),
        "generate": sources.signature(_ROLLOUT, "generate"),
        "custom_generate_keyword": sorted(
            strings(sources.find(_ROLLOUT, "generate_and_rm")) & {"evaluation"}
        ),
        "generate_state": sorted(_self_attributes(sources) & {"tokenizer", "aborted", "sampling_params"}),
        "payload": sorted(
            generate & {"input_ids", "sampling_params", "return_logprob", "return_routed_experts"}
        ),
        "meta_info": sorted(generate & {"output_token_logprobs"}),
        "post": _first_parameters(sources.signature(_HTTP, "post"), 2),
        "idle_check": sorted(
            text
            for text in strings(sources.tree(_CONTROL))
            if text in ("num_reqs", "num_total_reqs", "abort_all")
        ),
    }


def _fields(sources: Sources, name: str) -> list[str]:
    found = sources.find(_BASE, name)
    assert isinstance(found, ast.ClassDef)
    return fields(found)


def _members(status: ast.ClassDef) -> dict[str, str]:
    return {
        node.targets[0].id: str(ast.literal_eval(node.value))
        for node in status.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _self_attributes(sources: Sources) -> set[str]:
    """What a GenerateState has, by any of its methods."""
    return {
        node.attr
        for node in ast.walk(sources.find(_ROLLOUT, "GenerateState"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def _first_parameters(signature: list[str], num: int) -> list[str]:
    """The others differ between versions, and we do not give them."""
    return signature[:num]
