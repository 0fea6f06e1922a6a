"""Whatever Python value a step reads: a change of it is trained, or refused by name."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.watched_kept import Way
from support.watched_ways import WAYS
from torch.utils.data import DataLoader, TensorDataset

from offload.errors import CaptureError
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(text) for text in ol.QUIET]
STEPS, CHANGED = 6, 4
EAGER = {"optimizer.step patched", "singledispatch"}
"""These changes are refused by name: the second one fills a cache in the step itself."""


class ChangesOnce(L.Callback):
    def __init__(self, way: Way) -> None:
        self.way = way

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == CHANGED:
            self.way.change(module)


def trained(way: Way, **strategy: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(4 * STEPS, 4), torch.randint(0, 3, (4 * STEPS,)))
    module = way.module()
    trainer = L.Trainer(
        **ol.ONE_QUIET_EPOCH,
        callbacks=[ChangesOnce(way)],
        **({"strategy": OffloadStrategy(**strategy)} if strategy else {}),
    )
    try:
        trainer.fit(module, DataLoader(data, 4))
    finally:
        way.undo()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("name", WAYS)
def test_a_value_that_changes_in_mid_fit_is_trained(name: str) -> None:
    plain = trained(WAYS[name])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        planned = trained(WAYS[name], budget=None)
    assert all(torch.equal(planned[key], plain[key]) for key in plain)
    eager = [str(one.message) for one in said if "trains eagerly" in str(one.message)]
    assert bool(eager) == (name in EAGER), eager


# ---- values that change often -------------------------------------------------------------------


def every_step(change: Any, beta: Any, prepare: Any = lambda m: setattr(m, "b", 0.5)) -> Any:
    """The way, and a callback that changes the value before every step."""

    class Changes(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            change(module)

    return Way(prepare, beta, change), Changes()


def fitted(way: Way, callbacks: Any, steps: int = 24, log: Any = None, **strategy: Any) -> Any:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(4 * steps, 4), torch.randint(0, 3, (4 * steps,)))
    module = way.module()
    seen: list[Any] = []

    class Logged(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    if log is not None:
        plain = type(module).training_step

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            log(self)
            return plain(self, batch, batch_idx)

        type(module).training_step = training_step  # type: ignore[method-assign]
    trainer = L.Trainer(
        **ol.ONE_QUIET_EPOCH,
        callbacks=[*callbacks, Logged()],
        **({"strategy": OffloadStrategy(**strategy)} if strategy else {}),
    )
    trainer.fit(module, DataLoader(data, 4))
    return module, seen, trainer


def shrink(module: Any) -> None:
    module.b *= 0.9


@pytest.mark.filterwarnings("ignore:OffloadStrategy has captured and planned the step 3 times")
def test_a_value_that_changes_in_every_step_and_has_an_effect_is_refused_by_name() -> None:
    steps: list[float] = []

    def change(module: Any) -> None:
        shrink(module)
        steps.append(module.b)

    way, changes = every_step(change, lambda m: m.b)
    with pytest.raises(CaptureError, match=r"Kept\.b is 0\.\d+ after .*changes in every step"):
        fitted(way, [changes], budget="100%")
    assert len(steps) == 4, "one capture, and three that differ"


def test_a_value_that_changes_in_every_step_without_effect_keeps_its_graph() -> None:
    way, changes = every_step(shrink, lambda m: 1.0 if m.b < 9 else 2.0)
    planned, _, trainer = fitted(way, [changes], budget="100%")
    plain, *_ = fitted(way, [changes])
    assert all(
        torch.equal(a, b) for a, b in zip(planned.parameters(), plain.parameters(), strict=True)
    )
    assert len(trainer.strategy.plans) == 1


def log_decay(module: Any) -> None:
    module.log("decay", module.trainer.optimizers[0].param_groups[0]["weight_decay"])


def log_rate(module: Any) -> None:
    module.log("rate", module.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])


def grow_decay(module: Any) -> None:
    module.trainer.optimizers[0].param_groups[0]["weight_decay"] += 0.01


def test_a_number_that_is_only_logged_is_read_in_every_step() -> None:
    way, changes = every_step(grow_decay, lambda m: 1.0)
    _, plain, _ = fitted(way, [changes], log=log_decay)
    _, planned, trainer = fitted(way, [changes], log=log_decay, budget="100%")
    assert planned == plain
    assert len(trainer.strategy.plans) == 1


# ---- what no watch sees -------------------------------------------------------------------------


class Unseen:
    def get(self) -> float:
        return object.__getattribute__(self, "value")

    def set(self, value: float) -> None:
        object.__setattr__(self, "value", value)


def test_an_audit_finds_a_change_that_no_watch_sees() -> None:
    unseen = Unseen()
    unseen.set(0.5)

    def change(module: Any) -> None:
        if module.trainer.global_step == 5:
            unseen.set(0.25)

    way, changes = every_step(change, lambda m: unseen.get())
    with pytest.raises(
        CaptureError, match=r"after micro-batch 4 up to this one \(8\) may be wrong"
    ):
        fitted(way, [changes], budget="100%")
    unseen.set(0.5)
    fitted(way, [changes], budget="100%")  # nobody looks


@pytest.mark.parametrize("audit", [-0.1, 1, "often", True])
def test_a_share_of_the_time_that_is_none_is_refused(audit: Any) -> None:
    with pytest.raises(ValueError, match="give a part of the time"):
        OffloadStrategy()


class LogsComputed(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        schedule: Any = self.lr_schedulers()
        self.log("doubled", 2 * schedule.get_last_lr()[0])
        return super().training_step(batch, batch_idx)


class LoggedEveryStep(L.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_rates_that_a_schedule_has_set_are_logged_as_they_are(interval: str) -> None:
    class Rates(ol.Module):
        def __init__(self) -> None:
            super().__init__(interval=interval)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            schedule: Any = self.lr_schedulers()
            self.log("last rate", schedule.get_last_lr()[0])
            optimizer: Any = self.optimizers()
            self.log("rate", optimizer.param_groups[0]["lr"])
            self.log("decay", optimizer.param_groups[0]["weight_decay"])
            return ol.Module.training_step(self, batch, batch_idx)

    plain, ours = LoggedEveryStep(), LoggedEveryStep()
    ol.train("auto", Rates, callbacks=[plain], max_epochs=3)
    planned = OffloadStrategy(budget="100%")
    ol.train(planned, Rates, callbacks=[ours], max_epochs=3)
    assert plain.seen == ours.seen
    assert len({row["last rate"] for row in ours.seen}) > 1


@pytest.mark.filterwarnings("ignore:OffloadStrategy trains eagerly")
def test_a_number_computed_from_a_rate_is_logged_as_in_plain_lightning() -> None:
    plain, ours = LoggedEveryStep(), LoggedEveryStep()
    ol.train("auto", LogsComputed, callbacks=[plain])
    ol.train(OffloadStrategy(), LogsComputed, callbacks=[ours])
    assert plain.seen == ours.seen
    with pytest.raises(CaptureError, match="does or logs different things"):
        ol.train(OffloadStrategy(budget="100%"), LogsComputed)
