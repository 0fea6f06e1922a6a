"""What code may not do, read off the source text.

A decider, which is a file of a folder that calls itself pure, does not act, wait or roll dice. No
package swallows exceptions, prints, reads the environment, or keeps state in a module.
"""

import ast
from pathlib import Path

import pytest
from support import source_text
from support.source_text import (
    OURS,
    PACKAGES,
    ROOT,
    dotted,
    heads,
    imports,
    name,
    of,
    room,
    sources,
    tree,
)

read_once = source_text.read_once

PURE_FILES = (
    "loaders/lanes/lane_order.py",
    "offload/errors.py",
    "offload/sizes.py",
    "offload/lowering/micro_batches.py",
    "perfect/errors.py",
    "trainers/elastic/errors.py",
    "trainers/plain_values.py",
    "trainers/elastic/wire/address.py",
    "trainers/elastic/wire/message.py",
    "trainers/elastic/anchor/kinds.py",
    "trainers/elastic/wire/message.py",
    "trainers/elastic/wire/wire_errors.py",
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
WHO_CALLS = {"threading.current_thread", "threading.get_ident"}


def pure_files() -> tuple[str, ...]:
    pure = [folder for folder, head in heads().items() if "Pure: every file." in head]
    inside = [name(path) for path in sources(*PACKAGES) if room(path) in pure]
    return (*inside, *PURE_FILES)


PURE = pure_files()


def test_the_folders_that_decide_are_pure() -> None:
    rooms = {room(ROOT / file) for file in PURE}
    assert {"offload.graph", "offload.planning", "loaders.order", "perfect.method"} <= rooms


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
    """Others may be called by several threads: a lock, who calls, and nothing else of them."""
    used = {dotted(node) for node in of(path, ast.Attribute)}
    return {name for name in used if name.split(".")[0] in CONCURRENT} <= LOCKS | WHO_CALLS


def test_only_these_files_have_threads_processes_and_queues_in_the_loaders() -> None:
    users = {
        name(path)
        for path in sources("loaders")
        for _, module in imports(path)
        if module.split(".")[0] in CONCURRENT or module.startswith("torch.multiprocessing")
        if module != "threading" or not only_locks(path)
    }
    assert users <= {
        "loaders/pipeline.py",  # a thread that ends it, where one of its own workers collects it
        "loaders/sharing/view_link.py",
        "loaders/sharing/view_server.py",
        "loaders/workers/worker_pool.py",
        "loaders/workers/child_process.py",
        "loaders/workers/crew.py",
        "loaders/workers/fork_server.py",
        "loaders/workers/processes.py",
        "loaders/workers/reading_thread.py",
        "loaders/workers/staging.py",
        "loaders/workers/worker.py",
    }


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
    # Lightning keeps a run's seed in the environment, and every job of a fleet has its own.
    swapped = {"trainers/random_state.py"}
    reads = []
    for path in sources(*PACKAGES):
        if name(path) in swapped:
            continue
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
