"""The source text of this repository: its files, their syntax trees, what they import."""

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("perfect", "loaders", "offload", "trainers")
OURS = (*PACKAGES, "benchmarks", "examples", "tests")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> dict[type, list[Any]]:
    """Every node of a file, by its type: one walk for all tests."""
    found: dict[type, list[Any]] = defaultdict(list)
    for node in ast.walk(tree(path)):
        found[type(node)].append(node)
    return found


def of(path: Path, *types: type) -> Iterator[Any]:
    return (node for kind in types for node in nodes(path).get(kind, ()))


@pytest.fixture(autouse=True, scope="session")
def read_once() -> None:
    """So that no test pays for reading everything."""
    arrows()
    for path in sources(*OURS):
        nodes(path)
    for package in PACKAGES:
        importlib.import_module(package)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, whole dotted module) of every import, wherever in the file it stands."""
    for node in of(path, ast.Import, ast.ImportFrom, ast.Call):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: import by the whole name"
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and dotted(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            [first, *_] = node.args
            yield node.lineno, str(first.value) if isinstance(first, ast.Constant) else "?"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name; a package by its folder's."""
    return {
        name(path)[: -len(".py")].replace("/", ".").removesuffix(".__init__"): path
        for path in sources(*PACKAGES)
    }


def room(path: Path) -> str:
    """The folder of a file, as the heads name it. A file of a package's root is one by itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if len(parts) == 2:
        return parts[0] if parts[1] == "__init__" else ".".join(parts)
    return ".".join(parts[:-1])


@cache
def arrows() -> dict[str, set[str]]:
    """Which rooms each room imports, itself left out."""
    known = modules()
    found: dict[str, set[str]] = defaultdict(set)
    for path in known.values():
        for node in of(path, ast.ImportFrom, ast.Import):
            targets: set[str] = set()
            if isinstance(node, ast.ImportFrom) and node.module in known:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    targets.add(whole if whole in known else node.module)
            elif isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names if alias.name in known}
            found[room(path)] |= {room(known[target]) for target in targets} - {room(path)}
    return found


def heads() -> dict[str, str]:
    """The docstring of every folder below a package's root."""
    return {
        room(path): ast.get_docstring(tree(path)) or ""
        for path in sources(*PACKAGES)
        if path.name == "__init__.py" and path.parent.parent != ROOT
    }
