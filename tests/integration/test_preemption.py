"""Steps that are stopped between any nodes, their memory lent and written over: eager's bits.

A guest comes as often as it can, borrows some of the device's arena and fills it.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from products import every_value
from support.fake_gpu import only_on_a_fake_gpu
from support.offload_training import trained_once
from support.stage_jobs import DEVICES

from benchmarks.jobs.intruder import Intruder
from offload import Runner
from offload.running.runner_memory import IN_STEP
from offload.running.stage import Stage

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


class Nomad:
    """A context manager: its thread moves the runner's steps from stage to stage in this block."""

    def __init__(self, runner: Runner, stage: Callable[[], Stage]) -> None:
        self._runner, self._stage = runner, stage
        self.in_step = 0
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Nomad":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over.wait(1e-4):
                if self._runner._step_moves._runs_on is None:
                    continue  # between two steps
                stage = self._stage()
                plans = self._runner._plans
                how: Any = {"stage": stage, "owned": True, "in_step": True}
                moved = self._runner.move_to(plans.plan, plans.first, **how)
                self.in_step += moved.way == IN_STEP
        except BaseException as error:
            self._error = error


@pytest.mark.parametrize(
    "name, engine", every_value(["gpt", "resnet18", "vit", "llama"], ENGINES[:3])
)
def test_a_step_that_moves_to_other_stages_has_eagers_bits(name: str, engine: str) -> None:
    case = trained_once(name, str(DEVICES[engine]))
    made = case.planned(0.6, "auto")
    nomads: list[Nomad] = []

    def beside(runner: Runner) -> Nomad:
        made_stage = partial(Stage, runner.stage.device, engine, "random")
        nomads.append(Nomad(runner, made_stage))
        return nomads[0]

    case.run(made, engine, 1, "random", beside=beside)
    assert nomads[0].in_step > 2
