"""The command line of flexfloor-serve: what passes through, what the CPU profile adds, what is refused."""

import ast
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flexfloor.membership.endpoint import Endpoint
from flexfloor.scheduling import clocks
from sglang_patches import plugin_config, serve, verify
from sglang_patches.cpu import model_modules, profile
from sglang_patches.elastic.delays import DelayConfig
from sglang_patches.elastic_flags import ONLY, SWITCHES, unsupported
from sglang_patches.serve_args import CLOCKS, ServeArgs, parse

CPU = ["--model-path", "m", "--device", "cpu"]
FOUR = ["--tp-size", "4", "--ep-size", "4", "--dp-size=4", "--enable-dp-attention", "--enable-dp-lm-head"]
DENSE = ["--moe-dense-tp-size", "1"]
SPELLINGS = ("cli_name", "aliases")
ELASTIC = ["--flexfloor-membership", "elastic"]


def test_own_flags_are_taken_out_and_all_others_pass_through() -> None:
    flags = [*CPU, *FOUR, *DENSE, "--json-model-override-args", '{"a": "--flexfloor"}']
    args = parse([*flags[:3], "--flexfloor-collectives=shm", *flags[3:], "--flexfloor-leave-out", "a.b,c.d"])
    assert args.sglang_flags == flags
    assert (args.num_ranks, args.collectives, args.left_out) == (4, "shm", ("a.b", "c.d"))
    assert args.iteration_log == args.plugin_config().iteration_log == ""


def test_the_iteration_log_is_for_any_membership() -> None:
    for membership in ([], ELASTIC):
        args = parse([*CPU, *FOUR, *DENSE, *membership, "--flexfloor-iteration-log=/run/log"])
        assert args.plugin_config().iteration_log == "/run/log"


def test_membership_is_static_unless_asked() -> None:
    args = parse([*CPU, *FOUR, *DENSE])
    assert (args.membership, args.floor, args.delays.probability) == ("static", 1, 0.0)
    # What elastic membership refuses is no matter then.
    assert parse([*CPU, "--enable-eplb", "--flexfloor-floor=9"]).membership == "static"


def test_every_flag_of_elastic_membership_arrives() -> None:
    own = [
        *ELASTIC,
        *("--flexfloor-floor", "2", "--flexfloor-folder=/run/m", "--flexfloor-expert-slots", "reserved"),
        *("--flexfloor-park-frees", "experts,dense", "--flexfloor-prepare-timeout", "2.5"),
        *("--flexfloor-delays", "0.25,0.1,3,9"),
    ]
    args = parse([*CPU, *own, *FOUR, *DENSE])
    assert args.sglang_flags == [*CPU, *FOUR, *DENSE]
    assert args.plugin_config() == plugin_config.PluginConfig(
        device="cpu",
        membership="elastic",
        floor=2,
        folder="/run/m",
        expert_slots="reserved",
        park_frees=("experts", "dense"),
        prepare_timeout_s=2.5,
        delays=DelayConfig(probability=0.25, min_s=0.1, max_s=3.0, seed=9),
    )


def test_the_server_releases_only_when_told_to() -> None:
    args = parse([*CPU, *FOUR, *DENSE, *ELASTIC])
    assert (args.release, args.release_quiet_s, args.clock) == ("manual", 0.1, "neutral")
    own = ["--flexfloor-release=policy", "--flexfloor-release-quiet", "0.5", "--flexfloor-clock", "h200"]
    config = parse([*CPU, *FOUR, *DENSE, *ELASTIC, *own]).plugin_config()
    assert (config.release, config.release_quiet_s, config.clock) == ("policy", 0.5, "h200")


def test_the_clocks_that_a_flag_may_name_are_those_that_there_are() -> None:
    assert set(CLOCKS) == set(clocks.NAMES)


def test_a_device_with_graphs_reserves_slots_unless_told_otherwise() -> None:
    assert parse(["--device", "cuda"]).expert_slots == "reserved"
    assert parse(CPU).expert_slots == "exact"
    assert parse([*CPU, "--flexfloor-expert-slots=reserved"]).expert_slots == "reserved"


def test_a_parked_rank_may_keep_everything() -> None:
    assert parse([*CPU, "--flexfloor-park-frees", ""]).park_frees == ()


def test_no_other_spelling_of_a_flag_slips_past_elastic_membership() -> None:
    listed = {*SWITCHES, *ONLY}
    spellings = [names for names in sglang_flag_spellings() if listed & names]
    assert len(spellings) >= 30
    assert [names - listed for names in spellings if names - listed] == []
    assert listed - set().union(*spellings) == set(), "SGLang has no such flag"


def sglang_flag_spellings() -> Iterator[set[str]]:
    """Per field of SGLang's arguments all its flags, read from its source."""
    folder = verify.installed_root() / "sglang/srt/arg_groups/fields"
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                given = [word for word in ast.walk(node.annotation) if isinstance(word, ast.keyword)]
                texts = {word.arg: ast.literal_eval(word.value) for word in given if word.arg in SPELLINGS}
                name = texts.get("cli_name", "--" + node.target.id.replace("_", "-"))
                yield {name, *texts.get("aliases", ())}


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--enable-eplb"], [("--enable-eplb", "on")]),
        (["--quantization", "fp8"], [("--quantization", "fp8")]),
        (["--grpc-mode=x", "--enable-lora", "--tp", "4"], [("--grpc-mode", "x"), ("--enable-lora", "on")]),
        (["--pp-size", "1", "--nnodes=2", "--disaggregation-mode", "null"], []),
        (["--pp-size=2", "--pp-size", "1"], [("--pp-size", "2")]),
        (["--load-balance-method", "total_tokens"], []),
        (["--load-balance-method=random"], [("--load-balance-method", "random")]),
        (["--pp-size", "--tp", "4"], [("--pp-size", "")]),
        (["--pp-size"], [("--pp-size", "")]),
    ],
)
def test_what_elastic_membership_cannot_be_combined_with(
    flags: list[str], found: list[tuple[str, str]]
) -> None:
    assert [(row.flag, row.value) for row in unsupported(flags)] == found


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        (["--tp", "2", "--dp", "3"], 6),
        (["--tensor-parallel-size=4"], 4),
        ([], 1),
        ([*FOUR, *DENSE, "--pp-size", "2"], 8),
    ],
)
def test_number_of_ranks(flags: list[str], num_ranks: int) -> None:
    assert parse(flags).num_ranks == num_ranks


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            [*CPU, "--flexfloor-collectives", "nccl"],
            "--flexfloor-collectives=nccl: unknown. Fix: one of gloo, shm",
        ),
        (["--flexfloor-collectives", "shm"], "works on the CPU, not on device auto. Fix: add --device cpu"),
        ([*CPU, "--nnodes=2", "--flexfloor-collectives=shm"], "within one host only"),
        ([*CPU, "--flexfloor-flor", "2"], "--flexfloor-flor=2: there is no such flag"),
        ([*CPU, "--flexfloor-floor=few"], "--flexfloor-floor=few: not a number of ranks"),
        ([*CPU, "--flexfloor-floor=-1"], "--flexfloor-floor=-1: not a number of ranks"),
        ([*CPU, "--flexfloor-floor"], "--flexfloor-floor=: not a number of ranks"),
        ([*CPU, "--flexfloor-prepare-timeout", "0"], "--flexfloor-prepare-timeout=0: not a time in seconds"),
        ([*CPU, "--flexfloor-prepare-timeout", "1.2.3"], "=1.2.3: not a time in seconds"),
        ([*CPU, "--flexfloor-prepare-timeout", "soon"], "Fix: give a positive number"),
        ([*CPU, "--flexfloor-release", "soon"], "=soon: unknown. Fix: one of manual, drained, policy"),
        ([*CPU, "--flexfloor-release=drained"], "nobody can leave a static group. Fix: add --flexfloor-memb"),
        ([*CPU, "--flexfloor-retry", "never"], "--flexfloor-retry=never: unknown. Fix: one of auto, prefill"),
        ([*CPU, "--flexfloor-release-quiet", "0"], "--flexfloor-release-quiet=0: not a time in seconds"),
        ([*CPU, "--flexfloor-clock", "b200"], "--flexfloor-clock=b200: unknown. Fix: one of neutral, h20"),
        ([*CPU, "--flexfloor-delays", "0.5"], "--flexfloor-delays=0.5: not probability,min_s,max_s,seed"),
        ([*CPU, "--flexfloor-delays", "0.5,1,2,x"], "Fix: for example 0.01,0.2,2,0"),
        ([*CPU, "--flexfloor-membership", "often"], "=often: unknown. Fix: one of static, elastic"),
        ([*CPU, *ELASTIC], "needs several ranks that are attention-DP and EP ranks at once"),
        ([*CPU, *FOUR[:4], "--dp=4", *ELASTIC], "give --tp-size N --dp-size N --ep-size N"),
        (
            [*CPU, *FOUR, *DENSE, "--ep-size=2", *ELASTIC],
            "--flexfloor-membership=elastic: one rank is one worker, so --tp-size, --dp-size and --ep-size",
        ),
        ([*CPU, *FOUR, *DENSE, *ELASTIC, "--flexfloor-floor=0"], "--flexfloor-floor=0: there are 4 ranks"),
        ([*CPU, *FOUR, *DENSE, *ELASTIC, "--flexfloor-floor=5"], "Fix: take 1 to 4"),
        (
            [*CPU, *FOUR, *DENSE, *ELASTIC, "--flexfloor-expert-slots", "many"],
            "--flexfloor-expert-slots=many: unknown. Fix: one of exact, reserved",
        ),
        (
            [*CPU, *FOUR, *DENSE, *ELASTIC, "--flexfloor-park-frees", "kv,graphs"],
            "--flexfloor-park-frees=kv,graphs: unknown. Fix: any of experts, kv, dense",
        ),
        ([*CPU, "--tp", "four"], "--tp-size=four: not a positive integer"),
        (["--tp", "4", "--dp", "4", "--enable-dp-attention"], "Fix: add --enable-dp-lm-head"),
        (
            [*FOUR, *DENSE, "--enable-dp-attention-local-control-broadcast"],
            "its barriers would hang. Fix: leave the flag out",
        ),
        (FOUR, "--moe-dense-tp-size=not given: dense layers would be split over all ranks"),
    ],
)
def test_refusals_name_flag_value_and_fix(flags: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(flags)
    assert text in str(refused.value)


@pytest.fixture
def elastic_args() -> ServeArgs:
    return parse([*CPU, *FOUR, *DENSE, *ELASTIC, "--port", "31007"])


def test_the_managers_folder_is_private_and_its_token_new(elastic_args: ServeArgs, tmp_path: Path) -> None:
    args = replace(elastic_args, folder=str(tmp_path / "a" / "m"))
    folder = Path(serve.prepare_folder(args))
    assert folder == tmp_path / "a" / "m"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first = Endpoint.read(folder)
    # What an earlier server left would lead ranks to each other's dead sockets.
    (folder / "groups").write_text("old")
    serve.prepare_folder(args)
    assert not (folder / "groups").exists()
    assert Endpoint.read(folder).token != first.token
    assert Endpoint.read(folder).address == first.address == f"ipc://{folder}/manager.sock"


def test_without_a_folder_there_is_one_per_port(
    elastic_args: ServeArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert serve.prepare_folder(elastic_args) == str(tmp_path / "flexfloor-31007")
    assert serve.prepare_folder(parse(CPU)) == str(tmp_path / "flexfloor-30000")


def test_a_relative_folder_is_the_same_for_every_process(
    elastic_args: ServeArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert serve.prepare_folder(replace(elastic_args, folder="m")) == str(tmp_path / "m")


def test_a_folder_that_cannot_be_kept_from_others_ends_the_start(
    elastic_args: ServeArgs, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    for name in ("open", "file", "x" * 100):
        folder = tmp_path / name
        with pytest.raises(SystemExit) as refused:
            serve.prepare_folder(replace(elastic_args, folder=str(folder)))
        assert str(refused.value).startswith(f"flexfloor-serve: --flexfloor-folder={folder}: ")


def test_profile_fills_only_what_is_not_given() -> None:
    flags = profile.fill_flags(parse([*CPU, "--attention-backend=intel_amx"]))
    assert flags[:5] == [*CPU, "--attention-backend=intel_amx"]
    assert "torch_native" not in flags
    assert flags[flags.index("--sampling-backend") + 1] == "pytorch"


def test_profile_keeps_variables_of_the_user() -> None:
    args = parse([*CPU, *FOUR, *DENSE])
    inherited = {"OMP_NUM_THREADS": "7", "PYTHONPATH": "mine", "SGLANG_USE_CPU_ENGINE": "0"}
    variables = profile.environment(args, inherited)
    assert "OMP_NUM_THREADS" not in variables
    assert variables["PYTHONPATH"].endswith(os.pathsep + "mine")
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert len(variables["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 4


@pytest.mark.parametrize(
    ("cores", "num_ranks", "binding"),
    [([0, 1], 4, "0|1|0|1"), ([0, 1, 2, 5], 2, "0,1|2,5"), ([3], 2, "3|3"), ([0, 1, 2], 2, "0|1")],
)
def test_binding_of_ranks(cores: list[int], num_ranks: int, binding: str) -> None:
    assert profile.bind_ranks(cores, num_ranks) == binding


def test_only_model_files_of_the_checkpoint_are_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    unneeded = model_modules.unneeded(parse(["--model-path", str(tmp_path)])).split(",")
    assert "llama" in unneeded
    assert "qwen3_moe" not in unneeded
    assert (
        model_modules.unneeded(parse(["--model-path", str(tmp_path), "--speculative-algorithm", "X"])) == ""
    )
    assert model_modules.unneeded(parse(["--model-path", "org/name"])) == ""


def test_configuration_is_private_and_needs_no_cleaning() -> None:
    path = serve.publish_config(parse([*CPU, "--flexfloor-collectives", "shm"]))
    assert plugin_config.read(path) == plugin_config.PluginConfig(device="cpu", collectives="shm")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.close(int(Path(path).name))
    assert not os.path.exists(path)


def test_the_server_takes_over_the_pid_and_can_read_the_configuration(tmp_path: Path) -> None:
    """With a stand-in for SGLang's launcher that prints what it was started with."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import json, os, sys; path = os.environ['FLEXFLOOR_PLUGIN_CONFIG']\n"
        "print(json.dumps([os.getpid(), sys.argv[1:], json.load(open(path))]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_patches.serve", "--device", "cuda", "--model-path", "m"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    stdout, _ = process.communicate(timeout=60)
    pid, argv, config = json.loads(stdout)
    assert pid == process.pid
    assert argv == ["--device", "cuda", "--model-path", "m"]
    folder = tmp_path / "flexfloor-30000"
    expected = plugin_config.PluginConfig(device="cuda", expert_slots="reserved", folder=str(folder))
    # Its token is what the changing routes ask for, of a static server too.
    assert Endpoint.read(folder).token
    assert config == json.loads(plugin_config.dump(expected))


def test_a_list_of_plugins_without_ours_is_refused() -> None:
    serve.check_plugin_is_found({})
    serve.check_plugin_is_found({"SGLANG_PLUGINS": "other, flexfloor"})
    with pytest.raises(SystemExit, match=r"SGLANG_PLUGINS=other: leaves flexfloor out\. Fix: add it"):
        serve.check_plugin_is_found({"SGLANG_PLUGINS": "other"})


def test_help_names_our_flags(capsys: pytest.CaptureFixture[str]) -> None:
    serve.main(["--help"])
    text = capsys.readouterr().out
    assert "--flexfloor-collectives gloo|shm" in text
    names = ("membership", "floor", "folder", "expert-slots", "park-frees", "prepare-timeout", "delays")
    for name in (*names, "release", "release-quiet", "clock"):
        assert f"\n  --flexfloor-{name} " in text
