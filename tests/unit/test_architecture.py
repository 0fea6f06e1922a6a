"""The layering of docs/architecture.md, read off the source text.

perfect -> trainers -> offload
   |          |
   +----------+------> loaders         nobody imports perfect

Between folders the arrows are what the head of each folder's `__init__.py` says: `May import: ...`,
no more and no less, and they go one way.
"""

import ast
import importlib
import re
from collections import defaultdict

import pytest
from support import source_text
from support.source_text import (
    OURS,
    PACKAGES,
    ROOT,
    arrows,
    heads,
    imports,
    name,
    of,
    sources,
    tree,
)

read_once = source_text.read_once

MAY_IMPORT = {
    "perfect": {"perfect", "loaders", "offload", "trainers"},
    "trainers": {"trainers", "loaders", "offload"},
    "loaders": {"loaders"},
    "offload": {"offload"},
}
MOST_LINES = 400
SAME_NAME = {
    "__init__.py": "every folder has one",
}
"""File names that may stand twice in a package, and why."""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in sources(package)
        for line, module in imports(path)
        if module.split(".")[0] in {*OURS} - MAY_IMPORT[package]
    ]
    assert not wrong


# ---- folders ------------------------------------------------------------------------------------


def declared(folder: str, head: str) -> set[str]:
    """The rooms that a head says may be imported: `graph` is one of the same package."""
    lines = re.findall(r"May import: ([^.]*(?:\.[a-z_][^.]*)*)\.", head)
    assert len(lines) == 1, f"{folder}/__init__.py: one line `May import: ...` is needed"
    if lines[0] == "nothing of ours":
        return set()
    names = [word.strip() for word in lines[0].split(",")]
    package = folder.split(".")[0]
    return {n if n.split(".")[0] in PACKAGES else f"{package}.{n}" for n in names}


def test_a_folder_imports_what_its_head_says_no_more_and_no_less() -> None:
    actual = arrows()
    said = {folder: declared(folder, head) for folder, head in heads().items()}
    assert {f: sorted(rooms) for f, rooms in said.items()} == {f: sorted(actual[f]) for f in said}


def test_arrows_between_folders_go_one_way() -> None:
    """Round by round, rooms that import only rooms that are gone already; a circle stays."""
    left = {room: {*rooms} for room, rooms in arrows().items()}
    while ready := [room for room, rooms in left.items() if not rooms & left.keys()]:
        for found in ready:
            del left[found]
    assert left == {}


def test_no_class_name_has_two_meanings() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(*PACKAGES):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(name(path))
    assert {cls: files for cls, files in found.items() if len(files) > 1} == {}


def test_the_vocabulary_has_forty_words_with_one_meaning_each() -> None:
    text = (ROOT / "docs/vocabulary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \|$", text, re.MULTILINE)[1:]  # the first is the head
    assert 0 < len(rows) <= 40
    words = [word for row in rows for word in row.split(", ")]
    assert len(words) == len(set(words))


def test_the_first_line_of_a_docstring_has_at_most_100_columns() -> None:
    for path in sources(*PACKAGES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                assert len(first) <= 100, f"{name(path)}: {first}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_name_stands_twice_in_a_package(package: str) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(package):
        if path.name not in SAME_NAME:
            found[path.name].append(name(path))
    assert {file: paths for file, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_name_is_never_a_submodule_too(package: str) -> None:
    """Or `import offload.plan` would yield a module before a function, and a function after."""
    for path in sources(package):
        if path.name == "__init__.py":
            inside = {p.stem for p in path.parent.glob("*.py")}
            inside |= {p.parent.name for p in path.parent.glob("*/__init__.py")}
            bound = {
                alias.asname or alias.name
                for node in tree(path).body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            assert not bound & inside, name(path)


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {name(p): len(p.read_text(encoding="utf-8").splitlines()) for p in sources(*OURS)}
    assert {file: n for file, n in lengths.items() if n > MOST_LINES} == {}


def test_the_tests_are_no_package() -> None:
    assert not [name(p) for p in (ROOT / "tests").rglob("__init__.py")]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_a_package_with_python_in_it_is_a_package(package: str) -> None:
    folders = {path.parent for path in sources(package)}
    assert ROOT / package in folders
    assert not [name(f) for f in folders if not (f / "__init__.py").exists()]
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_all_of_a_package_is_exactly_what_it_exports(package: str) -> None:
    """Public names are what `public_names` imports from ours; `__init__` gives them late."""
    names = ROOT / package / "public_names.py"
    bound = [
        alias.asname or alias.name
        for node in of(names, ast.ImportFrom)
        if (node.module or "").split(".")[0] in PACKAGES
        for alias in node.names
    ]
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(bound)
    assert all(getattr(module, each) is not None for each in bound)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_the_promised_names_are_where_they_are_promised() -> None:
    import loaders
    import perfect

    assert perfect.ReuseLoader is loaders.ReuseLoader
    assert {"ReuseLoader", "PhaseSwitch", "PlateauDetector"} <= set(perfect.__all__)
