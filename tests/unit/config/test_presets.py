"""Every shipped YAML composes into a configuration that the rules accept."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flexfloor.cli.compose import CONF_DIR, compose, to_train_config
from flexfloor.config import TrainConfig
from flexfloor.config.choices import MembershipMode
from flexfloor.config.memory import rollout_memory, trainer_bytes
from flexfloor.config.rules import validate
from flexfloor.errors import ConfigError

GIB = 1024**3
RUN = "run_dir=runs/test"
ATTACHED = ["cluster.server_url=http://node1:30000", "cluster.trainer_endpoint=tcp://node1:5555"]
MATH = ["data.path=math.jsonl", "model.path=checkpoint"]
ELASTIC = ["membership=elastic", "membership.floor=2"]
COMMAND_LINES = {
    "quickstart": ["experiment=quickstart"],
    "8xh200": ["experiment=qwen3_30b_a3b_8xh200", *MATH],
    "8xh100": ["experiment=qwen3_30b_a3b_8xh100", *MATH, "logging=wandb"],
    "16xh200": ["experiment=qwen3_30b_a3b_16xh200", *MATH, *ATTACHED],
    "16xh100": ["experiment=qwen3_30b_a3b_16xh100", *MATH, *ATTACHED],
    "parquet": ["experiment=qwen3_30b_a3b_8xh200", *MATH, "data=parquet"],
    "release_exit": ["experiment=quickstart", *ELASTIC, "release=exit"],
    "release_command": ["experiment=quickstart", *ELASTIC, "release=command", "release.command=[true]"],
    "release_logprobs": ["experiment=quickstart", *ELASTIC, "release=logprobs"],
    "release_slurm": [
        "experiment=quickstart",
        *ELASTIC,
        "release=slurm",
        *ATTACHED[:1],
        "membership.folder=m",
    ],
    "hf_disk": ["experiment=qwen3_30b_a3b_8xh200", *MATH, "data=hf_disk", "scheduling=least_inflight"],
    "reasoning_gym": ["experiment=qwen3_30b_a3b_8xh200", "model.path=checkpoint", "data=reasoning_gym"],
}


@pytest.fixture(scope="module")
def configs() -> dict[str, TrainConfig]:
    return {name: to_train_config(compose([*line, RUN])) for name, line in COMMAND_LINES.items()}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_shipped_configuration_is_accepted(configs: dict[str, TrainConfig], name: str) -> None:
    validate(configs[name], check_files=False)


def test_command_lines_above_reach_every_shipped_option() -> None:
    chosen = {Path("train"), Path("plan"), Path("simulate")} | {
        Path(f"{group}/{option}") for group, option in _chosen_options()
    }
    shipped = {file.relative_to(CONF_DIR).with_suffix("") for file in CONF_DIR.rglob("*.yaml")}
    assert shipped == chosen


def _chosen_options() -> set[tuple[str, str]]:
    defaults = yaml.safe_load((CONF_DIR / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {pair for entry in defaults if isinstance(entry, dict) for pair in entry.items() if pair[1]}
    for line in COMMAND_LINES.values():
        pairs = [tuple(text.split("=", 1)) for text in line if "." not in text.partition("=")[0]]
        chosen |= {(group, option) for group, option in pairs}
        (experiment,) = (option for group, option in pairs if group == "experiment")
        preset = yaml.safe_load((CONF_DIR / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8"))
        entries = [pair for entry in preset["defaults"] for pair in entry.items()]
        chosen |= {(name.removeprefix("override /"), option) for name, option in entries}
    return chosen


def test_experiments_open_with_the_question_they_answer() -> None:
    for file in (CONF_DIR / "experiment").glob("*.yaml"):
        package, question = file.read_text(encoding="utf-8").splitlines()[:2]
        assert package == "# @package _global_", file
        assert question.startswith("# "), file
        assert "?" in question, file
        assert ("Not yet run on a GPU." in question) == (file.stem != "quickstart"), file


def test_experts_and_kv_of_qwen3_30b_a3b(configs: dict[str, TrainConfig]) -> None:
    one_node = rollout_memory(configs["8xh200"].model, configs["8xh200"].rollout, 8)
    two_nodes = rollout_memory(configs["16xh200"].model, configs["16xh200"].rollout, 16)
    assert (one_node.num_expert_slots, one_node.expert_bytes) == (16, 6.75 * GIB)
    assert (two_nodes.num_expert_slots, two_nodes.expert_bytes) == (8, 3.375 * GIB)
    assert one_node.kv_bytes == 24 * GIB


def test_trainer_bytes_follow_the_parallel_sizes(configs: dict[str, TrainConfig]) -> None:
    dense, experts = 1_541_093_376 // 4, 48 * 128 * 4_718_592 // 8
    # 8 ranks: experts have no replica, dense weights two; 16 ranks: two and four.
    assert trainer_bytes(configs["8xh200"]) == (dense + experts) * 6 + (dense // 2 + experts) * 12
    assert trainer_bytes(configs["16xh200"]) == (dense + experts) * 6 + (dense // 4 + experts // 2) * 12
    assert trainer_bytes(configs["8xh100"]) == (dense + experts) * 6  # Adam state in host memory


@pytest.mark.parametrize(("floor", "is_refused"), [(1, True), (2, False), (8, False)])
def test_a_floor_whose_ranks_do_not_fit_is_refused(
    configs: dict[str, TrainConfig], floor: int, is_refused: bool
) -> None:
    membership = replace(configs["8xh200"].membership, mode=MembershipMode.elastic, floor=floor)
    config = replace(configs["8xh200"], membership=membership)
    if not is_refused:
        validate(config, check_files=False)
        return
    with pytest.raises(ConfigError) as refused:
        validate(config, check_files=False)
    assert refused.value.key == "membership.floor"
    for part in ("54.00 GiB for 128 experts", "of the trainer rank", "set membership.floor to 2 or more"):
        assert part in str(refused.value)
