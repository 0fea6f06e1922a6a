"""OffloadStrategy against plain Lightning: the same bits, at any budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import offload_lightning as ol

from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


@pytest.mark.parametrize("clipping", [0.1, None])
def test_a_run_within_the_smallest_budget_is_plain_lightnings(clipping: float | None) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": clipping}
    budget = ol.smallest(**options)
    ours = ol.train(OffloadStrategy(budget=budget), **options)
    assert ol.differences(ol.train(**options), ours) == []
    assert ours.strategy.plan.device_bytes <= budget
    assert all(p.grad is None for p in ours.module.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 3},
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"val_check_interval": 2},
        {"max_epochs": -1, "max_steps": 7},
        {"limit_train_batches": 5, "accumulate_grad_batches": 3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*overfit")
def test_the_trainers_own_limits_are_kept(options: dict[str, Any]) -> None:
    result = ol.train(OffloadStrategy(budget="60%"), **options)
    assert ol.differences(ol.train(**options), result) == []


def test_test_and_predict_run_after_the_fit() -> None:
    ours, theirs = ol.train(OffloadStrategy(budget="60%")), ol.train()
    for result in (ours, theirs):
        result.trainer.test(result.module, ol.data(20), verbose=False)
        result.trainer.validate(result.module, ol.data(20), verbose=False)
    assert ours.trainer.callback_metrics == theirs.trainer.callback_metrics
    predicted = [
        torch.cat(result.trainer.predict(result.module, ol.data(20)))  # type: ignore[arg-type]
        for result in (ours, theirs)
    ]
    assert torch.equal(*predicted)


def test_a_second_fit_goes_on_from_the_first() -> None:
    ours, theirs = ol.train(OffloadStrategy(budget="60%")), ol.train()
    for result in (ours, theirs):
        result.trainer.fit_loop.max_epochs = 3
        torch.manual_seed(0)
        result.trainer.fit(result.module, ol.data(), ol.data(20))
    assert ol._unequal("", ours.module.state_dict(), theirs.module.state_dict()) == []


def test_afterwards_every_tensor_has_memory_of_its_own() -> None:
    result = ol.train(OffloadStrategy(budget="60%"))
    tensors = [*result.module.state_dict().values()]
    for state in result.trainer.optimizers[0].state.values():
        tensors += [t for t in state.values() if isinstance(t, torch.Tensor)]
    tensors[0].resize_(1)  # what lies in an arena cannot be
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    assert len(storages) == len(tensors)
    assert isinstance(result.trainer.strategy, OffloadStrategy)


def test_callbacks_of_lightning_work(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    def run(strategy: Any, folder: Path) -> tuple[ol.Result, Any]:
        keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
        callbacks = [keep, EarlyStopping("val_loss", patience=2), LearningRateMonitor()]
        logger = CSVLogger(folder, "", "")
        result = ol.train(
            strategy, callbacks=callbacks, logger=logger, enable_checkpointing=True,
            log_every_n_steps=1, max_epochs=4,
        )  # fmt: skip
        return result, keep

    ours, kept = run(OffloadStrategy(budget="60%"), tmp_path / "ours")
    theirs, also = run("auto", tmp_path / "theirs")
    assert ol.differences(theirs, ours) == []
    assert Path(kept.best_model_path).name == Path(also.best_model_path).name
    tables = [(tmp_path / who / "metrics.csv").read_text() for who in ("ours", "theirs")]
    assert tables[0] == tables[1]
    one, other = (torch.load(k.last_model_path, weights_only=False) for k in (kept, also))
    assert one.keys() == other.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        assert ol._unequal(part, one[part], other[part]) == []
    sizes = [Path(k.last_model_path).stat().st_size for k in (kept, also)]
    assert abs(sizes[0] - sizes[1]) < 2000  # no arena was saved along
