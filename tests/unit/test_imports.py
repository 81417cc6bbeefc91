"""Who may import whom, and what a command line that starts nothing must not load."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "sglang", "megatron", "zmq")

# Python raises these audit events before the act itself, so nothing can be started unseen.
PROBE = """
import sys
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system",
          "socket.bind", "socket.connect")
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event) if event in STARTS else None)
from flexfloor.cli.train import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
heavy = [name for name in {heavy} if name in sys.modules]
print("PROBE", code, heavy, seen)
"""


def probe(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE.format(heavy=HEAVY), *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["experiment=quickstart", "--cfg", "job"], 0, "num_steps: 25"),
        (["experiment=quickstart", "rollout.ep_siz=4"], 2, "Did you mean rollout.ep_size?"),
        (["experiment=quickstart", "rollout.ep_size=16"], 2, "rollout.ep_size=16"),
        (["experiment=quickstart", "run_dir=/dev/null/run"], 2, "run_dir='/dev/null/run'"),
    ],
    ids=["show", "unknown key", "rule across groups", "rule of the machine"],
)
def test_starts_nothing_and_loads_nothing_heavy(tmp_path, arguments, code, text) -> None:
    done = probe(tmp_path, *arguments)
    assert done.stdout.splitlines()[-1] == f"PROBE {code} [] []", done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_probe_sees_a_started_process_and_a_heavy_module(tmp_path) -> None:
    """The test above can fail."""
    script = PROBE.format(heavy=HEAVY).replace(
        "from flexfloor.cli.train import main", "import subprocess, zmq; subprocess.run(['true']); main = int"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "PROBE 0 ['zmq'] ['subprocess.Popen']\n"


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [tool, "--no-cache"], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
