"""Any optimizer in Lightning: plain Lightning's bits, on a GPU's engines, checkpoints, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import own_optimizers as own
import pytest
from support import offload_lightning as ol
from support.accelerators import on_each_accelerator, only_on_gpu
from torch import optim

from offload import CaptureError
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "radam": (optim.RAdam, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {"t0": 4}),
    "adafactor": (optim.Adafactor, {}),
    "dampened": (optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "slow": (own.Slow, {}),
}


def module_with(kind: Any, **more: Any) -> Callable[[], L.LightningModule]:
    class Module(ol.Module):
        def configure_optimizers(self) -> Any:
            optimizer = kind(self.parameters(), lr=0.01, **more)
            schedule = optim.lr_scheduler.OneCycleLR(
                optimizer, 0.02, total_steps=40, cycle_momentum=False
            )
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module


@pytest.mark.parametrize("name", KINDS)
def test_a_planned_run_is_plain_lightnings_to_the_last_bit(name: str) -> None:
    kind, more = KINDS[name]
    make = module_with(kind, **more)
    strategy = OffloadStrategy(budget="60%", optimizer="auto")
    ours = ol.train(strategy, make, gradient_clip_val=0.5)
    assert ol.differences(ol.train("auto", make, gradient_clip_val=0.5), ours) == []
    assert strategy.spent.runs


@pytest.mark.parametrize("name", ["radam", "rprop"])
def test_a_checkpoint_of_a_planned_run_goes_on_in_plain_lightning_and_back(
    name: str, tmp_path: Path
) -> None:
    kind, more = KINDS[name]
    make = module_with(kind, **more)
    made = {}
    for side, strategy in (("plain", "auto"), ("ours", OffloadStrategy(budget="60%"))):
        made[side] = tmp_path / f"{side}.ckpt"
        ol.train(strategy, make, max_epochs=1).trainer.save_checkpoint(made[side])
    on = ol.train("auto", make, ckpt_path=made["plain"])
    for strategy, path in (("auto", "ours"), (OffloadStrategy(budget="60%"), "plain")):
        assert ol.differences(on, ol.train(strategy, make, ckpt_path=made[path])) == []


@on_each_accelerator
@pytest.mark.filterwarnings("ignore:.*accumulat")
def test_gradients_of_several_batches_are_updated_with(accelerator: str) -> None:
    make = module_with(optim.RAdam, betas=(0.9, 0.99))
    ours = ol.train(OffloadStrategy(budget="60%"), make, accumulate_grad_batches=3)
    assert ol.differences(ol.train("auto", make, accumulate_grad_batches=3), ours) == []


@only_on_gpu
def test_a_captured_graph_would_keep_the_counters_so_none_has_them(accelerator: str) -> None:
    make = module_with(optim.RAdam, betas=(0.9, 0.99))
    with pytest.warns(RuntimeWarning, match=r"step\(\) of RAdam computes with its counters"):
        ours = ol.train(OffloadStrategy(engine="cudagraph"), make, max_epochs=4)
    assert ol.differences(ol.train("auto", make, max_epochs=4), ours) == []


@pytest.mark.parametrize("kind", [own.Branching, own.Together])
def test_an_optimizer_that_cannot_be_planned_is_named(kind: Any) -> None:
    make = module_with(kind)
    with pytest.raises(CaptureError, match=f"optimizer {kind.__name__} cannot be planned"):
        ol.train(OffloadStrategy(budget="1GiB"), make)
    with pytest.warns(UserWarning, match=f"trains eagerly.*optimizer {kind.__name__}"):
        ours = ol.train(OffloadStrategy(), make)
    assert ol.differences(ol.train("auto", make), ours) == []
