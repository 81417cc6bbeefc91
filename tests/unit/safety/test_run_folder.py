"""A run's folder is private and holds no key."""

import stat
from pathlib import Path

from omegaconf import OmegaConf

from flexfloor.cli.compose import compose, save_resolved
from flexfloor.report.run_data import _config


def test_no_key_in_the_run_s_folder(tmp_path: Path) -> None:
    override = "+rollout.server_args.admin-api-key=k1"
    node = compose(["experiment=quickstart", override, f"run_dir={tmp_path}"])
    tmp_path.chmod(0o755)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create([override, "seed=3"]), tmp_path / ".hydra" / "overrides.yaml")
    OmegaConf.save(node, tmp_path / ".hydra" / "config.yaml")
    save_resolved(node, str(tmp_path))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    saved = OmegaConf.load(tmp_path / "config.yaml")
    assert saved.rollout.server_args["admin-api-key"] == "***"
    assert saved.rollout.max_response_tokens == node.rollout.max_response_tokens
    assert saved == OmegaConf.load(tmp_path / "config.yaml")
    assert OmegaConf.load(tmp_path / ".hydra" / "overrides.yaml")[1] == "seed=3"
    texts = [path.read_text() for path in tmp_path.rglob("*.yaml")]
    assert len(texts) == 3
    assert not any("k1" in text for text in texts)


def test_a_report_shows_no_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 3\nrollout: {server_args: {api-key: k1}}\n")
    assert _config(tmp_path, []) == {"seed": "3", "rollout.server_args.api-key": "***"}
