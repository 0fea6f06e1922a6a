"""Private names of torch and Lightning stand in the seams modules alone, and each is tested."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload.torch_seams
import trainers.lightning_seams

ROOT = Path(__file__).parents[2]
PACKAGES = ("perfect", "loaders", "offload", "trainers")
TESTED_BY = {
    "offload/torch_seams.py": ("test_torch_seams.py",),
    "loaders/torch_seams.py": ("test_torch_seams.py",),
    "trainers/torch_seams.py": ("test_torch_seams.py",),
    "trainers/lightning_seams.py": ("test_lightning_seams.py",),
}
LIBRARIES = ("torch", "lightning", "torchvision", "torchmetrics")
REACHES_IN = ("getattr", "setattr", "hasattr", "delattr")


def _seams(path: str) -> set[str]:
    """What a seams module defines for others."""
    found = {"pytree"} if path == "offload/torch_seams.py" else set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
    for statement in ast.parse((ROOT / path).read_text()).body:
        for node in statement.body if isinstance(statement, ast.Try) else [statement]:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")} - {"TESTED", "raise_missing"}


@pytest.mark.parametrize("path", TESTED_BY)
def test_every_seam_is_touched_by_a_test(path: str) -> None:
    tests = [ast.parse((Path(__file__).parent / name).read_text()) for name in TESTED_BY[path]]
    nodes = [node for test in tests for node in ast.walk(test)]
    touched = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert _seams(path) - touched == set()


def test_the_bounds_of_the_project_are_those_that_the_errors_name() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for bound in (offload.torch_seams.TESTED, trainers.lightning_seams.TESTED):
        assert f'"{bound}",' in project
    assert offload.torch_seams.TESTED in (ROOT / "loaders/torch_seams.py").read_text()


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _defined(tree: ast.AST) -> set[str]:
    """Names that a file defines: functions, classes, variables, attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if _start(node.value) in ("self", "cls") else set()
    return found


def _start(node: ast.AST) -> str:
    """`torch` of `torch._C.x`, `super` of `super().x`."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _foreign(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Private names that this file uses and that we have not defined.

    `x._name` may be ours only if this file defines `_name`; of `self._name`, any file may.

    What it cannot see: a private name of a library's that the same file also defines, on an object
    that is not called torch or lightning; of `self`, one that any file defines; names in
    strings, except as the second argument of getattr and the like; what a class overrides."""
    here = _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            start = _start(node)
            own = isinstance(node.value, ast.Name | ast.Call) and start in ("self", "cls", "super")
            known = ours if own else here
            if start in LIBRARIES or (start not in ("os", "sys") and node.attr not in known):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and _is_library(node.module):
            for name in (*str(node.module).split("."), *(alias.name for alias in node.names)):
                if _private(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_library(alias.name) and any(map(_private, alias.name.split("."))):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Call) and _start(node) in REACHES_IN and len(node.args) > 1:
            name = node.args[1]
            given = str(name.value) if isinstance(name, ast.Constant) else ""
            if _private(given) and given not in {*here, "_fields"}:  # namedtuple's, and documented
                yield node.lineno, given


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in LIBRARIES


def test_no_private_name_of_torch_or_lightning_stands_outside_the_seams() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
    ours = {
        name for file, tree in trees.items() if file not in TESTED_BY for name in _defined(tree)
    }
    found = {
        file: [f"line {line}: {name}" for line, name in _foreign(tree, ours)]
        for file, tree in trees.items()
        if file not in TESTED_BY
    }
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._x()",
        "from torch.utils import _pytree",
        "from torch._ops import OpOverload",
        "import torch._dynamo",
        "trainer.fit_loop._data_source",
        "optimizer._step_count",
        "self._ddp_kwargs",
        "tensor.untyped_storage()._cdata",
        "getattr(p, '_hooks', None)",
    ],
)
def test_the_scan_sees_a_private_name(line: str) -> None:
    assert [*_foreign(ast.parse(line), set())]
