"""Resolved configuration of every experiment: a diff of these files shows what a change of a default does.

Rewrite them with `python -m tests.golden.regenerate` and read the diff before committing it.
"""

from pathlib import Path

from omegaconf import OmegaConf

from flexfloor.cli.compose import CONF_DIR, compose

GOLDEN_DIR = Path(__file__).parent


def experiments() -> list[str]:
    return sorted(file.stem for file in (CONF_DIR / "experiment").glob("*.yaml"))


def resolved_text(experiment: str) -> str:
    # The run folder holds the time of day.
    return OmegaConf.to_yaml(compose([f"experiment={experiment}", "run_dir=RUN_DIR"]), resolve=True)


def main() -> None:
    for name in experiments():
        (GOLDEN_DIR / f"{name}.yaml").write_text(resolved_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
