"""Which of SGLang's model files a server can leave unimported.

Every rank imports all of them, 250 files, to find the one it needs: a third of its start on a CPU.
"""

import json
from pathlib import Path

from sglang_patches.serve_args import ServeArgs, flag_value, has_flag
from sglang_patches.verify import installed_root

_MODEL_FLAGS = ("--model-path", "--model")


def unneeded(args: ServeArgs) -> str:
    """Value of SGLANG_DISABLED_MODEL_ARCHS: the model files that the checkpoint does not name, or nothing.

    Nothing when that cannot be told: a checkpoint that is not a local folder, an architecture without a file
    of its own, or flags that bring in a second model.
    """
    model_path = flag_value(args.sglang_flags, *_MODEL_FLAGS)
    if model_path is None or _has_second_model(args.sglang_flags):
        return ""
    definitions = [f"class {name}(" for name in architectures(Path(model_path))]
    files = sorted((installed_root() / "sglang" / "srt" / "models").glob("*.py"))
    needed = [file for file in files if _mentions_any(file, definitions)]
    return ",".join(file.stem for file in files if file not in needed) if needed else ""


def architectures(model_path: Path) -> list[str]:
    """Model classes that the checkpoint's config.json names; none when there is no such local file."""
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = config.get("architectures") if isinstance(config, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _has_second_model(flags: list[str]) -> bool:
    names = [flag.partition("=")[0] for flag in flags]
    return has_flag(flags, "--model-impl") or any(name.startswith("--speculative") for name in names)


def _mentions_any(file: Path, definitions: list[str]) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace")
    return any(definition in text for definition in definitions)
