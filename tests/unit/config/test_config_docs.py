"""What a reader finds beside the keys."""

import ast
import inspect

from flexfloor.cli.refusals import valid_keys
from flexfloor.config import choices, schema


def test_field_docstrings_stand_under_fields_that_need_a_word() -> None:
    documented = _documented_fields()
    for name in (
        "RolloutConfig.max_running_requests",
        "RolloutConfig.kv_cache_tokens",
        "ClusterConfig.device_memory_bytes",
        "ModelConfig.dense_bytes",
        "ModelConfig.expert_bytes",
        "AlgorithmConfig.importance_cap",
        "TrainerConfig.optimizer_offload",
        "DataConfig.reward",
        "DataConfig.reward_on_error",
        "TrainConfig.run_dir",
    ):
        assert documented.get(name), name


def _documented_fields() -> dict[str, str]:
    found = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[f"{node.name}.{ast.unparse(field.target)}"] = ast.literal_eval(text.value)
    return found


def test_choices_are_spelt_as_yaml_matches_them() -> None:
    for _, enum in inspect.getmembers(choices, inspect.isclass):
        if enum.__module__ == choices.__name__:
            assert all(member.name == member.value == member.name.lower() for member in enum)


def test_valid_keys_reach_into_every_group() -> None:
    keys = valid_keys()
    assert {"seed", "rollout", "rollout.ep_size", "model.tiny.top_k", "trainer.optimizer_offload"} <= set(
        keys
    )
