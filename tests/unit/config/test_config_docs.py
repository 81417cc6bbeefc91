"""What a reader finds beside the keys."""

import inspect

from flexfloor.cli.refusals import valid_keys
from flexfloor.config import choices


def test_choices_are_spelt_as_yaml_matches_them() -> None:
    for _, enum in inspect.getmembers(choices, inspect.isclass):
        if enum.__module__ == choices.__name__:
            assert all(member.name == member.value == member.name.lower() for member in enum)


def test_valid_keys_reach_into_every_group() -> None:
    keys = valid_keys()
    assert {"seed", "rollout", "rollout.ep_size", "model.tiny.top_k", "trainer.optimizer_offload"} <= set(
        keys
    )
