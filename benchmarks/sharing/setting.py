"""The training, the net that answers beside it, who asks it, and the core that they share.

    one core   | training's thread | threads that ask |      all of them, so the core is the device

A request has a time at which it is due, drawn beforehand. Its time begins then, even if nobody
could ask at that moment, and the next request does not wait for its answer.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.fleet_peers.gpt_jobs import GptJob, GptSize, make
from offload.gate import Gate, Guest
from trainers import OffloadStrategy
from trainers.steps.step_session import StepSession

SIZE = GptSize(layers=4, width=256, heads=4, length=128, words=2048, batch=8)
TINY = GptSize(layers=1, width=32, heads=2, length=16, words=64, batch=2)
WARM = 3
"""Steps before the first request: they are planned, and compared with eager ones."""
THREADS = 8
"""So many requests can wait at once."""


def one_core() -> None:
    """Bind this process to one core, for it and for all that it starts later."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def served(smoke: bool) -> tuple[nn.Module, torch.Tensor]:
    """The net that answers, and what it is asked."""
    import torchvision

    torch.manual_seed(7)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 10)) if smoke else torchvision.models.resnet18()
    pixels = 4 if smoke else 32
    return net.eval(), torch.randn(1 if smoke else 4, 3, pixels, pixels)


class NotingGate(Gate):
    """Keeps all guests with their times."""

    def __init__(self) -> None:
        super().__init__()
        self.guests: list[Guest] = []

    @contextmanager
    def granted(self, priority: int = 0, *, inside: bool = False) -> Iterator[Guest]:
        with super().granted(priority, inside=inside) as guest:
            yield guest
        self.guests.append(guest)


class BetweenSteps(NotingGate):
    """Alternation by whole steps, as Gandiva has it: nodes never see that somebody waits."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, False if name == "wanted" else value)


def strategy_with(gate: Gate, **options: Any) -> OffloadStrategy:
    strategy = OffloadStrategy(**options)
    gate.close()
    strategy._run.guests.gate = gate
    strategy._run.session = StepSession(gate)
    return strategy


@dataclass(frozen=True, slots=True)
class Took:
    """One request, by the clock of this process."""

    due: float
    answered: float
    right: bool

    @property
    def seconds(self) -> float:
        return self.answered - self.due


class Requests:
    """Poisson arrivals at a rate, in threads, between `begin` and `end`."""

    def __init__(
        self, ask: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, right: torch.Tensor,
        rate: float, seed: int,
    ) -> None:  # fmt: skip
        """`right`: the answer that is expected."""
        self.took: list[Took] = []
        self.paused = False
        """Nobody asks now: requests that become due are left out."""
        self._ask, self._x, self._right, self._rate = ask, x, right, rate
        self._chance = random.Random(seed)
        self._over, self._lock = threading.Event(), threading.Lock()
        self._due = 0.0
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]

    def begin(self) -> None:
        self._due = perf_counter()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._due += self._chance.expovariate(self._rate)
                    due = self._due
                if self._over.wait(max(0.0, due - perf_counter())):
                    return
                if self.paused:
                    continue
                answer = self._ask(self._x)
                answered = perf_counter()
                self.took.append(Took(due, answered, torch.equal(answer, self._right)))
        except BaseException as error:
            self._errors.append(error)


def data(size: GptSize, steps: int) -> DataLoader[Any]:
    size = GptSize(**{**asdict(size), "steps": steps})
    return make({"seed": 0, "lr": 1e-4, "size": asdict(size)})["train"]()


def fitted(
    strategy: OffloadStrategy, size: GptSize, steps: int, callbacks: Sequence[L.Callback]
) -> dict[str, torch.Tensor]:
    """Train, and return the weights."""
    L.seed_everything(0, verbose=False)
    module = GptJob(size, 1e-4)
    trainer = L.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy,
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks],
    )  # fmt: skip
    trainer.fit(module, data(size, steps))
    return {key: value.clone() for key, value in module.state_dict().items()}


def compared(number: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a round, with how many of their weights differ from the first one's."""
    first = rows[0]["weights"]
    for row in rows:
        weights = row.pop("weights")
        differ = sum(not torch.equal(value, first[key]) for key, value in weights.items())
        row |= {"round": number, "weights that differ": differ}
    return rows
