"""The schema as a page for readers: every key with its type, default and meaning. PURE.

Meanings are the docstrings that stand under the fields, and under the members of what a key may choose from.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING as NO_VALUE

REQUIRED = "required"
"""Default of a key that a preset or the command line must set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a command."""

    name: str
    """With its groups: `model.tiny.top_k`."""
    type_name: str
    default: str
    meaning: str
    choices: Mapping[str, str]
    """What it may choose from, each with its meaning, where it chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One option of a group."""

    name: str
    text: str
    """The file."""
    is_default: bool = False
    """What a command line that names no option of the group gets."""

    @property
    def summary(self) -> str:
        """Its first comment."""
        lines = self.text.removeprefix("# @package _global_\n").splitlines()
        comment = []
        for line in lines:
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        return " ".join(comment)


def keys_of(config_type: type[Any], prefix: str = "") -> Iterator[Key]:
    """The keys of one class, in the order of its fields; a nested group is no key of it."""
    hints, docs = get_type_hints(config_type), _docs_of(config_type)
    for field in fields(config_type):
        hint = hints[field.name]
        if is_dataclass(hint):
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Key(
            name=f"{prefix}{field.name}",
            type_name=_type_name(hint),
            default=REQUIRED if default is MISSING else _value_text(default),
            meaning=docs.get(field.name, ""),
            choices=_choices_of(hint),
        )


def groups_of(config_type: type[Any], prefix: str = "") -> Iterator[tuple[str, type[Any]]]:
    """Nested groups in dotted form, outer ones first."""
    hints = get_type_hints(config_type)
    for field in fields(config_type):
        if is_dataclass(hints[field.name]):
            group = hints[field.name]
            assert isinstance(group, type)
            yield f"{prefix}{field.name}", group
            yield from groups_of(group, f"{prefix}{field.name}.")


def summary_of(config_type: type[Any]) -> str:
    """The class's own docstring."""
    return _docs_of(config_type)[""]


def render_group(name: str, config_type: type[Any], presets: Sequence[Preset]) -> str:
    """A section: what the group is, its keys, what they choose from, its presets; without a name its keys."""
    keys = list(keys_of(config_type, f"{name}." if name else ""))
    parts = [f"## {name}\n\n{summary_of(config_type)}\n"] if name else []
    parts += [_key_table(keys), *(_choice_list(key) for key in keys if any(key.choices.values()))]
    if presets:
        parts += [_preset_table(name, presets), _preset_files(presets)]
    return "\n".join(parts)


def _key_table(keys: Sequence[Key]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        kind = ", ".join(f"`{name}`" for name in key.choices) or key.type_name
        default = key.default if key.default == REQUIRED else f"`{key.default}`"
        rows.append(f"| `{key.name}` | {kind} | {default} | {_cell(key.meaning)} |")
    return "\n".join(rows) + "\n"


def _choice_list(key: Key) -> str:
    items = [f"- `{name}`{f': {meaning}' if meaning else ''}" for name, meaning in key.choices.items()]
    return "\n".join([f"`{key.name}`:\n", *items]) + "\n"


def _preset_table(name: str, presets: Sequence[Preset]) -> str:
    rows = ["| preset | |", "|---|---|"]
    for preset in presets:
        default = "Default. " if preset.is_default else ""
        rows.append(f"| `{name}={preset.name}` | {default}{_cell(preset.summary)} |")
    return "\n".join(rows) + "\n"


def _preset_files(presets: Sequence[Preset]) -> str:
    files = [f'```yaml title="{preset.name}.yaml"\n{preset.text.strip()}\n```\n' for preset in presets]
    return "\n".join(['<details markdown="1"><summary>The files</summary>\n', *files, "</details>\n"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _type_name(hint: Any) -> str:
    """As a user writes values of it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        names = [_type_name(part) for part in arguments if part is not NoneType]
        return " or ".join([*names, "null"])
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    return {int: "integer", float: "number", str: "text", bool: "true or false", dict: "entries"}.get(
        origin or hint, "text"
    )


def _value_text(value: object) -> str:
    """As YAML writes it."""
    if value == NO_VALUE:
        return REQUIRED
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)


def _choices_of(hint: Any) -> dict[str, str]:
    for part in get_args(hint) or (hint,):
        if isinstance(part, type) and issubclass(part, StrEnum):
            docs = _docs_of(part)
            return {member.value: docs.get(member.name, "") for member in part}
    return {}


def _docs_of(documented: type[Any]) -> Mapping[str, str]:
    """Docstrings under the names that a class's body assigns, and its own under the empty name."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(documented))).body[0]
    assert isinstance(definition, ast.ClassDef)
    docs = {"": ast.get_docstring(definition) or ""}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        text = following.value if isinstance(following, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            for name in _assigned(node):
                docs[name] = " ".join(text.value.split())
    return docs


def _assigned(node: ast.stmt) -> Iterator[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    yield from (target.id for target in targets if isinstance(target, ast.Name))
