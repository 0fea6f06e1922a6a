"""The layering of docs/architecture.md, read off the source text: no import is executed but one.

perfect -> trainers -> offload
   |          |
   +----------+------> loaders         nobody imports perfect; a decider is pure
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
PURE = (
    "loaders/reuse.py",
    "loaders/tuning.py",
    "offload/arena.py",
    "offload/caching.py",
    "offload/copies.py",
    "offload/costs.py",
    "offload/engines/segments.py",
    "offload/engines/issue.py",
    "offload/errors.py",
    "offload/lowering/micro_batches.py",
    "offload/memgraph.py",
    "offload/observed.py",
    "offload/packing.py",
    "offload/planner.py",
    "offload/rates.py",
    "offload/recompute.py",
    "offload/reduction.py",
    "offload/refusal.py",
    "offload/remake.py",
    "offload/residency.py",
    "offload/search.py",
    "offload/simulator.py",
    "offload/sizes.py",
    "offload/taskgraph.py",
    "offload/verify.py",
    "offload/victims.py",
    "perfect/errors.py",
    "perfect/phases.py",
    "perfect/plateau.py",
    "perfect/schedule.py",
)
# Nothing that acts, waits or differs from one run to the next.
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "lightning", "logging", "multiprocessing", "os",
    "pathlib", "queue", "random", "secrets", "shutil", "signal", "socket", "subprocess", "sys",
    "tempfile", "threading", "time", "torch", "torchvision", "uuid",
}  # fmt: skip
CONCURRENT = {"threading", "_thread", "multiprocessing", "queue", "concurrent", "asyncio"}
LOCKS = {"threading.Lock", "threading.Condition"}
MOST_LINES = 500


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, whole dotted module) of every import, wherever in the file it stands."""
    for node in ast.walk(tree(path)):
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
    for node in ast.walk(tree(ROOT / file)):
        called = dotted(node)
        if called.startswith(("np.random.", "numpy.random.")):
            assert called.rsplit(".", 1)[1] in seeded, f"{file}:{node.lineno}: {called}"
        if isinstance(node, ast.Call) and called_is(node, "default_rng", "SeedSequence"):
            assert node.args, f"{file}:{node.lineno}: a generator without a seed"
        assert not isinstance(node, ast.Global), f"{file}:{node.lineno}: global"


def called_is(call: ast.Call, *names: str) -> bool:
    return dotted(call.func).rsplit(".", 1)[-1] in names


def test_a_decider_neither_reads_nor_writes_anything() -> None:
    calls = [
        f"{file}:{node.lineno}"
        for file in PURE
        for node in ast.walk(tree(ROOT / file))
        if isinstance(node, ast.Call) and called_is(node, "open", "print", "input", "eval", "exec")
    ]
    assert not calls


def only_locks(path: Path) -> bool:
    """Others may be called by several threads: a lock, and nothing else of them."""
    used = {dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    return {name for name in used if name.split(".")[0] in CONCURRENT} <= LOCKS


def test_only_three_files_have_threads_processes_and_queues_in_the_loaders() -> None:
    users = {
        name(path)
        for path in sources("loaders")
        for _, module in imports(path)
        if module.split(".")[0] in CONCURRENT or module.startswith("torch.multiprocessing")
        if module != "threading" or not only_locks(path)
    }
    assert users <= {"loaders/prefetch.py", "loaders/processes.py", "loaders/worker.py"}


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
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
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
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and dotted(node.func) in ("print", "builtins.print", "pprint")
    ]
    assert not calls


def test_no_package_reads_the_environment_as_a_second_configuration() -> None:
    # Launchers say who a process is by environment variables; nobody else says anything.
    launcher = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "NODE_RANK"}
    reads = []
    for path in sources(*PACKAGES):
        for node in ast.walk(tree(path)):
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


def test_importing_perfect_starts_nothing_and_loads_no_plots() -> None:
    """In a process of its own. (Lightning loads matplotlib by itself; our plots must not.)"""
    script = """
import sys, threading
before = threading.active_count()
import perfect
import torch
assert threading.active_count() == before, threading.enumerate()
assert not torch.cuda.is_initialized()
late = {"perfect.report", "perfect.compare", "perfect.train"} & {*sys.modules}
assert not late, late
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
