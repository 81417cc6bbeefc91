"""The plugin's file: what is written is what every process reads, and nothing else is accepted."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches import plugin_config
from sglang_patches.elastic.delays import DelayConfig
from sglang_patches.plugin_config import EXPERT_SLOTS, PARK_FREES, RELEASES, PluginConfig

SECONDS = st.floats(0.0, 1e6)
DELAYS = st.builds(
    DelayConfig, probability=st.floats(0.0, 1.0), min_s=SECONDS, max_s=SECONDS, seed=st.integers(0, 2**31)
)
CONFIGS = st.builds(
    PluginConfig,
    device=st.sampled_from(["cpu", "cuda"]),
    left_out=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    iteration_log=st.text(max_size=10),
    membership=st.sampled_from(["static", "elastic"]),
    floor=st.integers(1, 64),
    folder=st.text(max_size=10),
    release=st.sampled_from(RELEASES),
    release_quiet_s=SECONDS,
    expert_slots=st.sampled_from(EXPERT_SLOTS),
    park_frees=st.lists(st.sampled_from(PARK_FREES), unique=True).map(tuple),
    prepare_timeout_s=SECONDS,
    delays=DELAYS,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugin") / "plugin.json"


@given(config=CONFIGS)
def test_what_is_written_is_what_is_read(path: Path, config: PluginConfig) -> None:
    path.write_text(plugin_config.dump(config), encoding="ascii")
    assert plugin_config.read(str(path)) == config


def test_all_but_the_device_may_be_left_out(path: Path) -> None:
    path.write_text('{"device": "cpu"}')
    assert plugin_config.read(str(path)) == PluginConfig(device="cpu")
    assert set(json.loads(plugin_config.dump(PluginConfig(device="cpu")))) == {
        row.name for row in fields(PluginConfig)
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "device"),
        ("[]", "not a mapping"),
        ("3", "not a mapping"),
        ('{"device": "cpu", "membership": "often"}', "membership='often', must be one of static, elastic"),
        ('{"device": "cpu", "expert_slots": null}', "expert_slots=None, must be one of exact, reserved"),
        ('{"device": "cpu", "collectives": "mpi"}', "must be one of gloo, shm"),
        ('{"device": "cpu", "release": "now"}', "release='now', must be one of manual, drained, policy"),
        ('{"device": "cpu", "park_frees": ["kv", "disk"]}', "park_frees=kv,disk, may hold experts"),
        ('{"device": "cpu", "park_frees": 1}', "not iterable"),
        ('{"device": "cpu", "floor": 0}', "floor=0, must be 1 or more"),
        ('{"device": "cpu", "floor": "2"}', "not supported between"),
        ('{"device": "cpu", "delays": {"often": 1}}', "often"),
        ('{"device": "cpu", "delays": [0.5]}', "must be a mapping"),
    ],
)
def test_what_cannot_be_used_names_the_file_and_the_problem(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plugin configuration .*plugin\.json cannot be used: ") as refused:
        plugin_config.read(str(path))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("expert_slots", "floor", "num_slots"),
    [("exact", 3, 0), ("reserved", 3, 43), ("reserved", 4, 32), ("reserved", 1, 128)],
)
def test_reserved_slots_hold_all_experts_at_the_floor(expert_slots: str, floor: int, num_slots: int) -> None:
    config = PluginConfig(device="cpu", expert_slots=expert_slots, floor=floor)
    assert config.num_reserved_slots(128) == num_slots
