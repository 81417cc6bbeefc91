"""Checkpoints appear whole or not at all, are kept by number, and a damaged one is passed over."""

from pathlib import Path

import pytest

from flexfloor.driver.checkpoints import MANIFEST_FILE, STATE_FILE, Checkpoints, RunState, new_state


def state(step: int) -> RunState:
    return new_state(
        step=step,
        weight_version=step,
        weight_checksum=f"checksum {step}",
        seed=3,
        config_digest="digest",
        run_id="run",
        steps_per_pass=4,
        windows={"window-0000-0001.json": {"batches": [[1, 2]]}},
        ledger=Path("/nowhere"),
    )


def write(path: str) -> None:
    """What a trainer does, in small."""
    folder = Path(path)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(path.encode() * 100)
    (folder / "metadata.json").write_text("{}")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    folder = tmp_path / "checkpoints"
    found = Checkpoints(folder, keep=2)
    for step in (3, 6, 9):
        found.save(state(step), write)
    return found


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def newest(checkpoints: Checkpoints) -> tuple[str | None, list[str]]:
    problems: list[str] = []
    found = checkpoints.newest(problems.append)
    return None if found is None else found.path.name, problems


def test_the_newest_are_kept_and_read_back(checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert names(tmp_path) == ["step-000006", "step-000009"]
    found = checkpoints.newest(pytest.fail)
    assert found is not None
    read = found.state
    assert (read.step, read.weight_version, read.weight_checksum, read.seed) == (9, 9, "checksum 9", 3)
    assert (read.pass_index, read.step_in_pass) == (2, 1)
    assert read.windows == {"window-0000-0001.json": {"batches": [[1, 2]]}}


def damage(folder: Path, what: str) -> None:
    match what:
        case "bit":
            data = bytearray((folder / "__0_0.distcp").read_bytes())
            data[7] ^= 4
            (folder / "__0_0.distcp").write_bytes(data)
        case "cut":
            (folder / "__0_0.distcp").write_bytes(b"")
        case "missing":
            (folder / "metadata.json").unlink()
        case "manifest":
            (folder / MANIFEST_FILE).write_text("{")
        case "no manifest":
            (folder / MANIFEST_FILE).unlink()
        case "state":
            (folder / STATE_FILE).write_text("{}")


@pytest.mark.parametrize("what", ["bit", "cut", "missing", "manifest", "no manifest", "state"])
def test_a_damaged_one_is_passed_over_and_told(checkpoints: Checkpoints, tmp_path: Path, what: str) -> None:
    damage(tmp_path / "checkpoints" / "step-000009", what)
    name, problems = newest(checkpoints)
    assert name == "step-000006"
    assert len(problems) == 1
    assert "step-000009: " in problems[0]
    damage(tmp_path / "checkpoints" / "step-000006", what)
    assert newest(checkpoints)[0] is None


def test_a_damaged_one_is_replaced_when_its_step_is_reached_again(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    damage(tmp_path / "checkpoints" / "step-000009", "cut")
    checkpoints.save(state(9), write)
    assert newest(checkpoints) == ("step-000009", [])
    assert names(tmp_path) == ["step-000006", "step-000009"]


def test_one_that_fails_leaves_the_others_and_what_it_left_is_cleaned(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def fails(path: str) -> None:
        write(path)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(state(12), fails)
    assert names(tmp_path) == ["step-000006", "step-000009", "step-000012.partial"]
    assert newest(checkpoints) == ("step-000009", [])
    checkpoints.clean()
    assert names(tmp_path) == ["step-000006", "step-000009"]


def test_no_folder_holds_none(tmp_path: Path) -> None:
    assert newest(Checkpoints(tmp_path / "nothing", keep=1)) == (None, [])
