"""Which names of SGLang our code imports, and which of them an SGLang lacks.

A hook's target may be unchanged while a name that the hook imports is gone: digests alone do not say that a
version works. Like `verify.py` this reads text only.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_OWN_ROOT = Path(__file__).parent


@dataclass(frozen=True, slots=True, order=True)
class UsedName:
    """`name` is empty for `import module`."""

    module: str
    name: str
    where: str
    """The file of ours that imports it."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


@lru_cache(maxsize=8)
def used_names(own_root: Path = _OWN_ROOT) -> tuple[UsedName, ...]:
    """Every import of `sglang` in our package, wherever it stands in a file."""
    found: set[UsedName] = set()
    for file in sorted(own_root.rglob("*.py")):
        where = str(file.relative_to(own_root))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found.update(UsedName(module, name, where) for module, name in _imports(node))
    return tuple(sorted(found))


def missing_names(root: Path, own_root: Path = _OWN_ROOT) -> list[UsedName]:
    """Those that the SGLang under `root` does not have."""
    return [used for used in used_names(own_root) if not has_name(root, used.module, used.name)]


def has_name(root: Path, module: str, name: str = "") -> bool:
    """Whether `from module import name` finds something in the sources under `root`."""
    file = module_file(root, module)
    if file is None:
        return False
    return not name or name in _bound_names(root, file) or module_file(root, f"{module}.{name}") is not None


def module_file(root: Path, module: str) -> Path | None:
    """The file of a module or package; None where there is none."""
    base = root.joinpath(*module.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and node.module and _is_sglang(node.module):
        yield from ((node.module, alias.name) for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names if _is_sglang(alias.name))


def _is_sglang(module: str) -> bool:
    return module.split(".")[0] == "sglang"


@lru_cache(maxsize=256)
def _bound_names(root: Path, file: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in _module_level(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            starred = module_file(root, node.module or "") if not node.level else None
            names.update(_bound_names(root, starred) if starred else ())
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported, those in `if` and `try` too."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _module_level(child)
