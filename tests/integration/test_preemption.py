"""Steps that are stopped between any nodes, their memory lent and written over: eager's bits.

A guest comes as often as it can, borrows some of the device's arena and fills it.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from products import every_value

from benchmarks.twins.intruder import Intruder
from benchmarks.twins.twin_graph import GraphTwin
from benchmarks.twins.twin_streams import Twin
from offload import Runner

HERE = Path(__file__).parent
DRIVERS: dict[str, Callable[[], Any]] = {
    "serial": lambda: None, "threads": lambda: None, "cuda": Twin, "cudagraph": GraphTwin,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained() -> Iterator[Callable[[str], Any]]:
    """`trained("gpt")` was captured and trained by eager PyTorch, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        training = importlib.import_module("offload_training")
        models = importlib.import_module("offload_models")
        kept: dict[str, Any] = {}

        def one(name: str) -> Any:
            if name not in kept:
                kept[name] = training.trained(models, models.cases()[name])
            return kept[name]

        yield one


@pytest.mark.parametrize(
    "name, engine, evicts",
    every_value(["gpt", "resnet18", "vit", "llama"], list(DRIVERS), [True, False]),
)
def test_a_step_that_is_stopped_anywhere_has_eagers_bits(
    name: str, engine: str, evicts: bool, trained: Callable[[str], Any]
) -> None:
    case = trained(name)
    intruders: list[Intruder] = []

    def beside(runner: Runner) -> Intruder:
        intruders.append(Intruder(runner, 3, evicts))
        return intruders[0]

    made = case.planned(0.6, "auto")
    order = "priority" if engine == "cudagraph" else "random"
    case.run(made, engine, 1, order, DRIVERS[engine](), beside)
    assert intruders[0].visits > 10
