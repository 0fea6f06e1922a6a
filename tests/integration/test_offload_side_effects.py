"""What a step does besides its tensors happens as often as in plain Lightning, or is refused."""

import gc
import logging
import queue
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.offload_lightning import ONE_QUIET_EPOCH, QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offload.torch_seams import FakeTensor
from offload.watching.value_kinds import StandIn
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
STEPS = 6
SEEN: list[Any] = []
COUNTS = {"steps": 0}
TOTAL = 0


def count_globally() -> None:
    global TOTAL
    TOTAL += 1


class Outer:
    inside: list[Any] = []  # noqa: RUF012


class Holder:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


class Module(L.LightningModule):
    def __init__(self, act: Callable[..., None], evaluate: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.seen: list[Any] = []
        self.holder = Holder()
        self.count = 0
        self.act, self.evaluate = act, evaluate

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        if not self.evaluate:
            self.act(self, loss, batch_idx)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        if self.evaluate:
            self.act(self, loss, batch_idx)
        self.log("seen", float(len(SEEN)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@dataclass(frozen=True)
class Effect:
    act: Callable[[Module, torch.Tensor, int], None]
    result: Callable[[Module], Any]


def closed_over() -> Effect:
    kept: list[Any] = []
    return Effect(lambda m, loss, i: kept.append(loss.detach()), lambda m: take(kept))


def take(kept: list[Any]) -> list[Any]:
    found = list(kept)
    kept.clear()
    return found


def counted(module: Module) -> int:
    global TOTAL
    found, TOTAL = TOTAL, 0
    return found


def print_it(module: Module, loss: torch.Tensor, batch_idx: int) -> None:
    print("a step")


def log_it(module: Module, loss: torch.Tensor, batch_idx: int) -> None:
    logging.getLogger("mine").warning("a step")


def count_attribute(module: Module, loss: torch.Tensor, batch_idx: int) -> None:
    module.count += 1


def in_queue() -> Effect:
    kept: queue.Queue[Any] = queue.Queue()

    def result(module: Module) -> list[Any]:
        return [kept.get() for _ in range(kept.qsize())]

    return Effect(lambda m, loss, i: kept.put(loss.detach()), result)


EFFECTS = {
    "a queue": in_queue(),
    "a list of the module": Effect(
        lambda m, loss, i: m.seen.append(loss.detach()), lambda m: m.seen
    ),
    "a global list": Effect(lambda m, loss, i: SEEN.append(loss.detach()), lambda m: take(SEEN)),
    "a list in a class": Effect(
        lambda m, loss, i: Outer.inside.append(loss.detach()), lambda m: take(Outer.inside)
    ),
    "a list closed over": closed_over(),
    "a dict in an object": Effect(
        lambda m, loss, i: m.holder.values.update(loss=loss.detach()), lambda m: m.holder.values
    ),
    "a list in an object in a list": Effect(
        lambda m, loss, i: m.holder.values.setdefault("all", []).append([loss.detach()]),
        lambda m: m.holder.values,
    ),
    "the batch's index": Effect(lambda m, loss, i: SEEN.append(i), lambda m: take(SEEN)),
    "the epoch": Effect(lambda m, loss, i: SEEN.append(m.current_epoch), lambda m: take(SEEN)),
    "a counter of the module": Effect(count_attribute, lambda m: m.count),
    "a global counter": Effect(lambda m, loss, i: count_globally(), counted),
    "a counter in a global dict": Effect(
        lambda m, loss, i: COUNTS.update(steps=COUNTS["steps"] + 1),
        lambda m: (COUNTS["steps"], COUNTS.update(steps=0))[0],
    ),
    "print": Effect(print_it, lambda m: None),
    "logging": Effect(log_it, lambda m: None),
}


def run(effect: Effect, evaluate: bool, **strategy: Any) -> tuple[Any, dict[str, float]]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(4 * STEPS, 4), torch.randint(0, 3, (4 * STEPS,)))
    module = Module(effect.act, evaluate)
    trainer = L.Trainer(
        **ONE_QUIET_EPOCH,
        **({"strategy": OffloadStrategy(**strategy)} if strategy else {}),
    )
    go = trainer.test if evaluate else trainer.fit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go(module, DataLoader(data, 4), **({"verbose": False} if evaluate else {}))
    return effect.result(module), {k: float(v) for k, v in trainer.callback_metrics.items()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(other) is type(one) and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def left_over(before: Sequence[Any] = ()) -> list[Any]:
    """The fakes and stand-ins that are reachable, wherever, besides those that were `before`: other
    tests make fits fail in ways that leave some."""
    gc.collect()
    known = {id(thing) for thing in before}
    found = [thing for thing in gc.get_objects() if isinstance(thing, FakeTensor | StandIn)]
    return [thing for thing in found if id(thing) not in known]


@pytest.mark.parametrize("evaluate", [False, True], ids=["training", "test"])
@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_of_a_step_happens_as_often_as_in_plain_lightning(
    name: str,
    evaluate: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    effect, before = EFFECTS[name], left_over()
    plain = run(effect, evaluate)
    said = capsys.readouterr().out.count("a step"), caplog.text.count("a step")
    caplog.clear()
    planned = run(effect, evaluate, budget=None)
    again = capsys.readouterr().out.count("a step"), caplog.text.count("a step")
    assert same(plain[0], planned[0]), f"{plain[0]} against {planned[0]}"
    assert plain[1] == planned[1]
    assert said == again
    assert left_over(before) == []


def write_file(path: Path) -> Effect:
    def act(module: Module, loss: torch.Tensor, batch_idx: int) -> None:
        with path.open("a") as file:
            file.write("a step\n")

    return Effect(act, lambda m: path.read_text().count("a step"))


def write_open_file(path: Path) -> Effect:
    file = path.open("a")

    def act(module: Module, loss: torch.Tensor, batch_idx: int) -> None:
        file.write("a step\n")

    def result(module: Module) -> int:
        file.close()
        return path.read_text().count("a step")

    return Effect(act, result)


@pytest.mark.parametrize("make", [write_file, write_open_file])
def test_a_file_is_written_as_often_as_in_plain_lightning(make: Any, tmp_path: Path) -> None:
    plain, _ = run(make(tmp_path / "plain"), False)
    planned, _ = run(make(tmp_path / "planned"), False, budget=None)
    assert plain == planned == STEPS


def initialise(module: Module, loss: torch.Tensor, batch_idx: int) -> None:
    if module.count == 0:
        module.count = 7
        module.holder.values["kind"] = "single"


def test_what_only_the_first_step_sets_is_set_and_the_step_is_planned() -> None:
    effect = Effect(initialise, lambda m: (m.count, m.holder.values))
    planned, _ = run(effect, False, budget="100%")
    assert planned == (7, {"kind": "single"})


class Steps(L.LightningModule):
    """Adds what differs from step to step to a set, which is no change if it is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: set[int] = set()
        self.done = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.add(self.trainer.fit_loop.total_batch_idx)
        self.done = True
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.done
        self.done = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_an_effect_that_a_second_trace_does_not_repeat_happens_in_later_steps() -> None:
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    module = Steps()
    trainer = L.Trainer(
        **ONE_QUIET_EPOCH,
        strategy=OffloadStrategy(),
    )
    with pytest.warns(UserWarning, match=r"trains eagerly.*changes from .* in a call"):
        trainer.fit(module, DataLoader(data, 4))
    assert module.seen == {*range(6)}
