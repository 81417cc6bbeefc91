"""The command line of flexfloor-serve: what passes through, what the CPU profile adds, what is refused."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_patches import plugin_config, serve
from sglang_patches.cpu import model_modules, profile
from sglang_patches.serve_args import parse

CPU = ["--model-path", "m", "--device", "cpu"]
FOUR = ["--tp-size", "4", "--ep-size", "4", "--dp-size=4", "--enable-dp-attention", "--enable-dp-lm-head"]
DENSE = ["--moe-dense-tp-size", "1"]


def test_own_flags_are_taken_out_and_all_others_pass_through() -> None:
    flags = [*CPU, *FOUR, *DENSE, "--json-model-override-args", '{"a": "--flexfloor"}']
    args = parse([*flags[:3], "--flexfloor-collectives=shm", *flags[3:], "--flexfloor-leave-out", "a.b,c.d"])
    assert args.sglang_flags == flags
    assert (args.num_ranks, args.collectives, args.left_out) == (4, "shm", ("a.b", "c.d"))


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
        ([*CPU, "--flexfloor-floor", "2"], "--flexfloor-floor=2: there is no such flag"),
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
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    stdout, _ = process.communicate(timeout=60)
    pid, argv, config = json.loads(stdout)
    assert pid == process.pid
    assert argv == ["--device", "cuda", "--model-path", "m"]
    assert config == {"device": "cuda", "collectives": "gloo", "left_out": []}


def test_a_list_of_plugins_without_ours_is_refused() -> None:
    serve.check_plugin_is_found({})
    serve.check_plugin_is_found({"SGLANG_PLUGINS": "other, flexfloor"})
    with pytest.raises(SystemExit, match=r"SGLANG_PLUGINS=other: leaves flexfloor out\. Fix: add it"):
        serve.check_plugin_is_found({"SGLANG_PLUGINS": "other"})


def test_help_names_our_flags(capsys: pytest.CaptureFixture[str]) -> None:
    serve.main(["--help"])
    assert "--flexfloor-collectives gloo|shm" in capsys.readouterr().out
