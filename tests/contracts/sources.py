"""Python sources of a package in a folder or a wheel, and what of them can be told without running them."""

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path


class Sources:
    """`root` is a folder that holds the package, or a wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._wheel = zipfile.ZipFile(root) if root.is_file() else None

    def text(self, path: str) -> str:
        """Raises FileNotFoundError naming the file and the root."""
        try:
            if self._wheel is not None:
                return self._wheel.read(path).decode("utf-8")
            return (self.root / path).read_text(encoding="utf-8")
        except (KeyError, OSError) as error:
            raise FileNotFoundError(f"{self.root} has no {path}") from error

    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.text(path))

    def find(self, path: str, dotted: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
        """A class or function by its name, `Class.method` for one inside. LookupError."""
        scope: ast.AST = self.tree(path)
        for name in dotted.split("."):
            scope = _child(scope, name, f"{path}: {dotted}")
        assert isinstance(scope, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        return scope

    def signature(self, path: str, dotted: str) -> list[str]:
        """Parameters in order: `name`, `name=default`, `*name`, `**name`; `*` before keyword-only ones."""
        found = self.find(path, dotted)
        if isinstance(found, ast.ClassDef):
            raise LookupError(f"{path}: {dotted} is a class")
        return signature_of(found.args)


def signature_of(args: ast.arguments) -> list[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    texts = [_parameter(one.arg, default) for one, default in zip(positional, defaults, strict=True)]
    if args.vararg:
        texts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        texts.append("*")
    texts += [_parameter(one.arg, d) for one, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        texts.append(f"**{args.kwarg.arg}")
    return texts


def methods(found: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those that are public."""
    for node in found.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def fields(found: ast.ClassDef) -> list[str]:
    """Names that the class body annotates: the fields of a dataclass."""
    return [
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def dict_keys(node: ast.AST) -> list[str]:
    """Constant keys of the first dict that is written in it."""
    for one in ast.walk(node):
        if isinstance(one, ast.Dict):
            return [str(key.value) for key in one.keys if isinstance(key, ast.Constant)]
    raise LookupError("no dict there")


def strings(node: ast.AST) -> set[str]:
    return {
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }


def imported(tree: ast.Module, package: str) -> list[str]:
    """`module:name` of what it imports from a package, and `module` where it imports the whole."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            found.update(f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == package)
    return sorted(found)


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _child(scope: ast.AST, name: str, wanted: str) -> ast.AST:
    for node in ast.walk(scope) if isinstance(scope, ast.Module) else scope.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    raise LookupError(f"{wanted}: not there")
