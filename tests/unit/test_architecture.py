"""The layering of docs/architecture.md, read off the source text.

perfect -> trainers -> offload
   |          |
   +----------+------> loaders         nobody imports perfect

Between folders the arrows are what the head of each folder's `__init__.py` says: `May import: ...`,
no more and no less, and they go one way. A folder that calls itself pure is pure in every file.
"""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("perfect", "loaders", "offload", "trainers")
OURS = (*PACKAGES, "benchmarks", "examples", "tests")
MAY_IMPORT = {
    "perfect": {"perfect", "loaders", "offload", "trainers"},
    "trainers": {"trainers", "loaders", "offload"},
    "loaders": {"loaders"},
    "offload": {"offload"},
}
PURE_FILES = (
    "offload/errors.py",
    "offload/sizes.py",
    "offload/lowering/micro_batches.py",
    "perfect/errors.py",
)
"""Pure, but in a folder that is not."""
# Nothing that acts, waits or differs from one run to the next.
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "lightning", "logging", "multiprocessing", "os",
    "pathlib", "queue", "random", "secrets", "shutil", "signal", "socket", "subprocess", "sys",
    "tempfile", "threading", "time", "torch", "torchvision", "uuid",
}  # fmt: skip
CONCURRENT = {"threading", "_thread", "multiprocessing", "queue", "concurrent", "asyncio"}
LOCKS = {"threading.Lock", "threading.Condition"}
MOST_LINES = 500
SAME_NAME = {
    "__init__.py": "every folder has one",
    "color.py": "loaders/color.py is the public name of loaders/pixels/color.py",
}
"""File names that may stand twice in a package, and why."""


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
            yield node.lineno, first.value if isinstance(first, ast.Constant) else "?"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


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


def pure_files() -> tuple[str, ...]:
    pure = [folder for folder, head in heads().items() if "Pure: every file." in head]
    inside = [name(path) for path in sources(*PACKAGES) if room(path) in pure]
    return (*inside, *PURE_FILES)


PURE = pure_files()


def test_the_folders_that_decide_are_pure() -> None:
    rooms = {room(ROOT / file) for file in PURE}
    assert {"offload.graph", "offload.planning", "loaders.order", "perfect.method"} <= rooms


def test_no_class_name_has_two_meanings() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(*PACKAGES):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(name(path))
    assert {cls: files for cls, files in found.items() if len(files) > 1} == {}


def test_the_glossary_names_classes_where_they_are() -> None:
    """Of docs/architecture.md: a word, what it means with its classes as code, a file or folder."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("\n## Words\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", section, re.MULTILINE)
    assert len(rows) == sum(line.startswith("| ") for line in section.splitlines()) - 1
    known = {
        node.name
        for path in sources(*PACKAGES)
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    }
    named = {cls for _, meaning, _ in rows for cls in re.findall(r"`([A-Z]\w+)`", meaning)}
    assert {"Engine", "LaneRecord", "MemGraph"} <= named
    assert named - known == set()
    assert [where for _, _, where in rows if not (ROOT / where).exists()] == []
    words = [one for word, *_ in rows for one in word.split(", ")]
    assert len(words) == len(set(words))


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


# ---- computed imports, deciders -----------------------------------------------------------------


def test_names_that_are_only_known_when_they_run_are_imported_in_the_builder_alone() -> None:
    # A computed import could go against the arrows unseen. The user's own classes need one.
    computed = {
        name(path)
        for path in sources(*PACKAGES)
        for _, module in imports(path)
        if not isinstance(module, str) or module == "?"
    }
    assert all(file.startswith("perfect/assembly") for file in computed)


@pytest.mark.parametrize("file", PURE)
def test_a_decider_imports_nothing_that_acts_waits_or_rolls_dice(file: str) -> None:
    found = [module for _, module in imports(ROOT / file) if module.split(".")[0] in IMPURE]
    assert not found
    # It may only import deciders of ours.
    ours = {module for _, module in imports(ROOT / file) if module.split(".")[0] in OURS}
    assert {f"{module.replace('.', '/')}.py" for module in ours} <= {*PURE}


@pytest.mark.parametrize("file", PURE)
def test_a_decider_draws_only_from_a_generator_that_it_was_given_the_seed_of(file: str) -> None:
    seeded = {"default_rng", "SeedSequence", "Generator"}
    assert not [*of(ROOT / file, ast.Global)]
    for node in of(ROOT / file, ast.Attribute, ast.Name, ast.Call):
        called = dotted(node)
        if called.startswith(("np.random.", "numpy.random.")):
            assert called.rsplit(".", 1)[1] in seeded, f"{file}:{node.lineno}: {called}"
        if isinstance(node, ast.Call) and called_is(node, "default_rng", "SeedSequence"):
            assert node.args, f"{file}:{node.lineno}: a generator without a seed"


def called_is(call: ast.Call, *names: str) -> bool:
    return dotted(call.func).rsplit(".", 1)[-1] in names


def test_a_decider_neither_reads_nor_writes_anything() -> None:
    calls = [
        f"{file}:{node.lineno}"
        for file in PURE
        for node in of(ROOT / file, ast.Call)
        if called_is(node, "open", "print", "input", "eval", "exec")
    ]
    assert not calls


def only_locks(path: Path) -> bool:
    """Others may be called by several threads: a lock, and nothing else of them."""
    used = {dotted(node) for node in of(path, ast.Attribute)}
    return {name for name in used if name.split(".")[0] in CONCURRENT} <= LOCKS


def test_only_three_files_have_threads_processes_and_queues_in_the_loaders() -> None:
    users = {
        name(path)
        for path in sources("loaders")
        for _, module in imports(path)
        if module.split(".")[0] in CONCURRENT or module.startswith("torch.multiprocessing")
        if module != "threading" or not only_locks(path)
    }
    assert users <= {
        "loaders/workers/prefetcher.py",
        "loaders/workers/processes.py",
        "loaders/workers/worker.py",
    }


def test_no_file_is_longer_than_500_lines() -> None:
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
    """Public names that `__init__` binds by importing from ours, or defines itself."""
    bound: set[str] = set()
    declared: list[str] | None = None
    for node in tree(ROOT / package / "__init__.py").body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            declared = ast.literal_eval(node.value)
    bound = {n for n in bound if not n.startswith("_")} - {"check_siblings"}
    assert set(declared or []) == bound
    assert declared is None or (len(declared) == len(bound))
    module = importlib.import_module(package)
    assert all(hasattr(module, n) for n in declared or [])


def test_the_promised_names_are_where_they_are_promised() -> None:
    import loaders
    import perfect

    assert perfect.ReuseLoader is loaders.ReuseLoader
    assert {"ReuseLoader", "PhaseSwitch", "PlateauDetector"} <= set(perfect.__all__)


def test_no_package_swallows_every_exception() -> None:
    bare = []
    for path in sources(*PACKAGES):
        for node in of(path, ast.ExceptHandler):
            everything = node.type is None
            silent = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            wide = dotted(node.type) in ("Exception", "BaseException") if node.type else True
            if everything or (wide and silent):
                bare.append(f"{name(path)}:{node.lineno}")
    assert not bare


def test_no_package_prints() -> None:
    calls = [
        f"{name(path)}:{node.lineno}"
        for path in sources(*PACKAGES)
        for node in of(path, ast.Call)
        if dotted(node.func) in ("print", "builtins.print", "pprint")
    ]
    assert not calls


def test_no_package_reads_the_environment_as_a_second_configuration() -> None:
    # Launchers say who a process is by environment variables; nobody else says anything.
    launcher = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "NODE_RANK"}
    reads = []
    for path in sources(*PACKAGES):
        for node in of(path, ast.Attribute, ast.Name):
            if dotted(node) in ("os.environ", "os.getenv", "environ", "getenv"):
                line = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
                if not any(variable in line for variable in launcher):
                    reads.append(f"{name(path)}:{node.lineno}")
    assert not reads


def test_no_module_of_a_package_keeps_state_that_changes() -> None:
    """A list, dict or set of a module is state for everybody: a tuple, a mapping proxy is not."""
    mutable = []
    for path in sources(*PACKAGES):
        for node in tree(path).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if any(dotted(target) == "__all__" for target in targets):
                continue
            literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
            called = isinstance(value, ast.Call) and called_is(value, "list", "dict", "set")
            if literal or called:
                mutable.append(f"{name(path)}:{node.lineno}")
    assert not mutable
