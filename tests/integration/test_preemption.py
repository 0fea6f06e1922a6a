"""Steps that are stopped between any nodes, their memory lent and written over: eager's bits.

A guest comes as often as it can, borrows some of the device's arena and fills it.
"""

import pytest
from support.fake_gpu import only_on_a_fake_gpu
from support.offload_training import trained_once
from support.products import every_value
from support.stage_jobs import DEVICES

from benchmarks.jobs.intruder import Intruder
from offload import Runner

ON_FAKE = (pytest.mark.gpu, only_on_a_fake_gpu("kernels of a GPU add in any order"))
ENGINES = ("serial", "threads", *(pytest.param(n, marks=ON_FAKE) for n in ("cuda", "cudagraph")))


@pytest.mark.parametrize(
    "name, engine, evicts",
    every_value(["gpt", "resnet18", "vit", "llama"], ENGINES, [True, False]),
)
def test_a_step_that_is_stopped_anywhere_has_eagers_bits(
    name: str, engine: str, evicts: bool
) -> None:
    case = trained_once(name, str(DEVICES[engine]))
    intruders: list[Intruder] = []

    def beside(runner: Runner) -> Intruder:
        intruders.append(Intruder(runner, 3, evicts))
        return intruders[0]

    made = case.planned(0.6, "auto")
    order = "priority" if engine == "cudagraph" else "random"
    case.run(made, engine, 1, order, beside=beside)
    assert intruders[0].visits > 10
