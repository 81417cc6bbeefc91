import pytest
from regenerate import GOLDEN_DIR, experiments, resolved_text


@pytest.mark.parametrize("name", experiments())
def test_resolved_configuration_is_the_committed_one(name: str) -> None:
    committed = (GOLDEN_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    assert resolved_text(name) == committed, "read the diff, then: python -m tests.golden.regenerate"


def test_every_golden_file_has_its_experiment() -> None:
    assert sorted(file.stem for file in GOLDEN_DIR.glob("*.yaml")) == experiments()
