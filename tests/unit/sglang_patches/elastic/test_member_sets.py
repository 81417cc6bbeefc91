"""The short list of prepared member sets: how it is written, what is refused, and the way to every rank."""

from pathlib import Path

import pytest

from sglang_patches import member_sets, plugin_config
from sglang_patches.plugin_config import PluginConfig
from sglang_patches.serve_args import ServeArgs, captures_graphs, parse

EIGHT = [
    "--tp-size=8", "--dp-size=8", "--ep-size=8", "--enable-dp-attention", "--enable-dp-lm-head",
    "--moe-dense-tp-size=1", "--flexfloor-membership=elastic",
]  # fmt: skip
NO_GRAPHS = ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill", "disabled"]


def parsed(*flags: str) -> ServeArgs:
    return parse([*EIGHT, *flags])


def test_a_set_is_sorted_and_the_order_of_the_sets_is_kept() -> None:
    assert member_sets.parse("3,1,0; 7,6 ;") == ((0, 1, 3), (6, 7))
    assert member_sets.parse("") == ()


@pytest.mark.parametrize("text", ["0,x", "0,,1", "-1,2", "0-3"])
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=r"is no list of ranks\. Fix: for example 0,1,2,3;0,1"):
        parsed("--flexfloor-member-sets", text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0,1;0,0", "0,0 names a rank twice"),
        ("0,1;0,8", "0,8 names rank 8, and there are 8 ranks"),
        ("0,1,2;5", "5 is smaller than the floor of 2"),
        ("0,1;1,0", "a set is named twice"),
    ],
)
def test_sets_that_the_group_cannot_have_are_refused(text: str, problem: str) -> None:
    with pytest.raises(SystemExit) as refused:
        parsed("--flexfloor-floor=2", "--flexfloor-member-sets", text)
    assert f": {problem}. Fix: name sets of 2 to 8 different ranks of 0 to 7." in str(refused.value)


def test_the_full_set_may_be_named_and_is_prepared_anyway() -> None:
    args = parsed("--flexfloor-member-sets=0,1,2,3,4,5,6,7;0,1,2,3;0,1")
    assert args.member_sets == (tuple(range(8)), (0, 1, 2, 3), (0, 1))
    assert member_sets.without_full(args.member_sets, 8) == ((0, 1, 2, 3), (0, 1))


def test_every_rank_reads_the_sets_as_they_were_written(tmp_path: Path) -> None:
    config = PluginConfig(device="cuda", member_sets=((0, 1, 2), (4, 5)))
    (tmp_path / "config").write_text(plugin_config.dump(config))
    assert plugin_config.read(str(tmp_path / "config")) == config
    assert parsed("--flexfloor-member-sets=0,1").plugin_config().member_sets == ((0, 1),)


@pytest.mark.parametrize(
    ("flags", "captures"),
    [
        ([], True),
        (["--disable-cuda-graph"], False),
        (NO_GRAPHS, False),
        (NO_GRAPHS[:1], True),
        (["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"], False),
        (["--disable-cuda-graph", "--cuda-graph-backend-decode", "full"], True),
    ],
)
def test_when_sglang_captures_graphs(flags: list[str], captures: bool) -> None:
    assert captures_graphs(flags) is captures


def test_graphs_over_experts_that_move_are_refused_on_a_gpu() -> None:
    for device in ([], ["--device", "cuda"]):
        with pytest.raises(SystemExit, match="a CUDA graph holds the addresses of the experts"):
            parsed(*device, "--flexfloor-expert-slots=exact")
    assert parsed("--flexfloor-expert-slots=exact", *NO_GRAPHS).expert_slots == "exact"
    assert parsed("--device=cpu", "--flexfloor-expert-slots=exact").expert_slots == "exact"
    assert parsed().expert_slots == "reserved"
