"""The reference page of the configuration is that of the schema, and says something of every key."""

import pytest

from flexfloor.cli import config_page
from flexfloor.cli.refusals import valid_keys
from flexfloor.config import TrainConfig
from flexfloor.config.plan import PlanConfig
from flexfloor.config.reference import Key, groups_of, keys_of
from flexfloor.config.simulate import SimulateConfig

COMMANDS = (TrainConfig, PlanConfig, SimulateConfig)
KEYS = [
    key
    for command in COMMANDS
    for name, group in [("", command), *groups_of(command)]
    for key in keys_of(group, f"{name}." if name else "")
]


def by_name(name: str) -> Key:
    return next(key for key in KEYS if key.name == name)


def test_the_page_is_current() -> None:
    fix = "run python -m flexfloor.cli.config_page"
    assert config_page.PAGE.read_text(encoding="utf-8") == config_page.render(), fix


@pytest.mark.parametrize("command", COMMANDS)
def test_no_key_is_left_out(command: type) -> None:
    groups = {name for name, _ in groups_of(command)}
    assert {key.name for key in KEYS} >= set(valid_keys(command)) - groups


def test_every_key_has_a_meaning() -> None:
    assert [key.name for key in KEYS if not key.meaning] == []


def test_every_preset_has_a_summary() -> None:
    groups = [*(name for name, _ in groups_of(TrainConfig)), "experiment"]
    silent = [preset.name for name in groups for preset in config_page.presets(name) if not preset.summary]
    assert silent == []


def test_values_are_written_as_yaml_writes_them() -> None:
    assert by_name("trainer.distributed_optimizer").default == "true"
    assert by_name("cluster.server_url").default == "null"
    assert by_name("membership.park_frees").default == "[experts, kv]"
    assert by_name("membership.member_sets").type_name == "list of list of integer"
    assert by_name("rollout.server_args").default == "{}"
    assert by_name("rollout.ep_size").default == "required"
    assert by_name("algorithm.importance_cap").type_name == "number or null"


def test_choices_come_with_their_meanings() -> None:
    choices = by_name("rollout.collectives").choices
    assert choices == {"gloo": "", "shm": "Shared memory within one host; CPU only.", "nccl": ""}
    assert set(by_name("membership.expert_slots").choices) == {"exact", "reserved"}


def test_defaults_of_groups_are_marked() -> None:
    marked = [preset.name for preset in config_page.presets("membership") if preset.is_default]
    assert marked == ["static"]
