"""Every place of the product that could run code out of data, with the reason why it does not.

A new one fails here: it gets a line with its reason, or goes. So does a line whose place is gone.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support import source_text
from support.source_text import PACKAGES, dotted, name, of, sources

read_once = source_text.read_once

MODULES = ("pickle", "marshal", "shelve", "joblib", "dill", "cloudpickle", "runpy")
"""They make objects, or run code, out of bytes."""
HARMLESS = ("HIGHEST_PROTOCOL", "PickleBuffer", "PicklingError", "UnpicklingError")
BUILTIN = ("eval", "exec", "compile", "__import__")
FUNCTIONS = ("torch.load", "np.load", "os.system", "os.popen", "yaml.load", "yaml.load_all")
METHODS = (
    *("load_from_checkpoint", "safe_globals", "add_safe_globals"),
    *("unsafe_load", "full_load", "UnsafeLoader", "FullLoader"),
)
IMPORTS = ("import_module", "find_spec", "resolve_name")
"""With a name that is not in the source."""
KEYWORDS = ("weights_only", "allow_pickle", "shell")

WRITES = "it writes, and reads nothing"
CHECKED = "of a checkpoint, tensors, containers and plain values alone are loaded"
OF_THE_USER = "the names are in the user's own code, YAML or command"
OF_OURS = "the names are ours"
PARENT = "the bytes come over a pipe from the process that made this one, or the one it made"
KEY_HOLDER = "the bytes come over a socket, from who has the key that its parent gave it"
REASONS: Mapping[str, Mapping[str, int]] = {
    WRITES: {
        "loaders/adopting/adoption.py pickle.Pickler": 1,
        "loaders/identity/held_values.py marshal.dumps": 1,
        "loaders/sharing/lent_blocks.py pickle.Pickler": 1,
        "loaders/sharing/remote_view.py pickle.dumps": 1,
        "loaders/sources/randomness.py pickle.dumps": 1,
        "loaders/batching/user_views.py pickle.dumps": 1,
        "loaders/workers/child_process.py pickle.dumps": 1,
        "loaders/workers/processes.py pickle.dumps": 1,
        "loaders/workers/staging.py pickle.dumps": 1,
        "loaders/workers/worker.py pickle.dumps": 2,
        "perfect/commands/training.py weights_only=True": 1,
        "trainers/atomic_checkpoint.py weights_only=weights_only": 1,
        "trainers/fleet/hosting/device_process.py pickle.dump": 1,
        "trainers/fleet/inputs/input_link.py pickle.dumps": 1,
        "trainers/fleet/jobs/lightning_job.py weights_only=True": 1,
        "trainers/fleet/jobs/job_turns.py weights_only=True": 1,
        "trainers/lightning_seams.py weights_only=False": 1,
    },
    CHECKED: {
        "perfect/commands/training.py weights_only=True": 1,
        "trainers/elastic/peer/elastic_strategy.py weights_only=True": 1,
        "trainers/fleet/jobs/lightning_job.py weights_only=True": 1,
        "trainers/fleet/ray_cluster/tune_trial.py weights_only=True": 1,
        "offload/replaying/step_file.py torch.load": 1,
        "offload/replaying/step_file.py weights_only=True": 1,
        "perfect/commands/replaying.py weights_only=True": 1,
        "trainers/read_checkpoint.py torch.load": 1,
        "trainers/read_checkpoint.py weights_only=True": 1,
    },
    "of numpy's arrays, numbers alone are loaded": {
        "perfect/text/bpe.py allow_pickle=False": 1,
        "perfect/text/bpe.py np.load": 1,
    },
    OF_THE_USER: {
        "loaders/convert.py resolve_name": 1,
        "loaders/identity/own_code.py find_spec": 1,
        "loaders/identity/own_code.py resolve_name": 1,
        "perfect/assembly/own_class.py import_module": 1,
    },
    OF_OURS: {
        "perfect/assembly/run.py find_spec": 1,
        "perfect/__init__.py find_spec": 1,
        "trainers/fleet/search/optuna_pruner.py find_spec": 1,
    },
    PARENT: {
        "loaders/workers/child_process.py pickle.loads": 1,
        "loaders/workers/staging.py pickle.loads": 1,
        "loaders/workers/worker.py pickle.loads": 5,
        "trainers/fleet/hosting/device_process.py .recv()": 2,
    },
    KEY_HOLDER: {
        "loaders/sharing/lent_blocks.py pickle.Unpickler": 1,
        "loaders/sharing/view_link.py .recv()": 2,
        "trainers/fleet/inputs/input_link.py .recv()": 1,
        "trainers/fleet/inputs/input_service.py .recv()": 1,
        "trainers/fleet/inputs/input_service.py pickle.loads": 1,
    },
    "the fleet has written the file itself, over what was there, before it starts the job": {
        "trainers/fleet/hosting/device_process.py pickle.load": 1,
    },
}


def uses(path: Path) -> Iterator[str]:
    """Yield what a file does that may run code out of data, however it is called."""
    for node in of(path, ast.Attribute, ast.Name):
        text = dotted(node)
        first, _, rest = text.partition(".")
        of_a_module = first in MODULES and rest and rest not in HARMLESS
        if text in (*BUILTIN, *FUNCTIONS) or of_a_module or rest.rpartition(".")[2] in METHODS:
            yield text
    for node in of(path, ast.Call):
        called = dotted(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
        if called in IMPORTS and not (node.args and isinstance(node.args[0], ast.Constant)):
            yield called
        if called == "recv" and not node.args:  # a Connection's, which unpickles
            yield ".recv()"
        yield from (
            f"{keyword.arg}={ast.unparse(keyword.value)}"
            for keyword in node.keywords
            if keyword.arg in KEYWORDS
        )
    for node in of(path, ast.Import):
        yield from (f"import {a.name} as" for a in node.names if a.asname and a.name in MODULES)
    for node in of(path, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        if node.module in MODULES or (
            node.module in ("torch", "yaml", "numpy") and "load" in names
        ):
            yield f"from {node.module} import"


def test_each_place_that_could_run_code_out_of_data_is_listed_with_its_reason() -> None:
    found = Counter(f"{name(path)} {use}" for path in sources(*PACKAGES) for use in uses(path))
    listed = Counter[str]()
    for places in REASONS.values():
        listed.update(places)
    assert found - listed == Counter(), "new: list it with its reason, or remove it"
    assert listed - found == Counter(), "gone: remove its line"


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("from pickle import loads", "from pickle import"),
        ("import pickle as p", "import pickle as"),
        ("map(torch.load, paths)", "torch.load"),
        ("from torch import load", "from torch import"),
        ("Net.load_from_checkpoint(path)", "Net.load_from_checkpoint"),
        ("trainer.fit(module, weights_only=False)", "weights_only=False"),
        ("np.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("eval(text)", "eval"),
        ("importlib.import_module(given)", "import_module"),
        ("subprocess.run(line, shell=True)", "shell=True"),
        ("yaml.load(text, Loader=yaml.UnsafeLoader)", "yaml.UnsafeLoader"),
        ("torch.serialization.add_safe_globals([A])", "torch.serialization.add_safe_globals"),
        ("(yield).recv()", ".recv()"),
    ],
)
def test_a_use_is_found_however_it_is_written(source: str, use: str, tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(source, encoding="utf-8")
    assert use in {*uses(path)}
    path.with_name("plain.py").write_text("import json\nmodel.eval()\nsocket.recv(4)\n")
    assert not [*uses(path.with_name("plain.py"))]


def test_an_assertion_does_nothing_so_python_may_leave_it_out() -> None:
    """`python -O` does. What is called in one changes nothing."""
    inside = [
        node
        for path in sources(*PACKAGES)
        for assertion in of(path, ast.Assert)
        for node in ast.walk(assertion.test)
    ]
    assert not [node for node in inside if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield)]
    called = {ast.unparse(node.func) for node in inside if isinstance(node, ast.Call)}
    assert {text.rpartition(".")[2] for text in called} == {"isinstance", "max", "all"}
