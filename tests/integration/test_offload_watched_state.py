"""Whatever Python value a step reads: a change of it is trained, or refused by name."""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from offload.errors import CaptureError, OffloadError
from trainers import OffloadStrategy

sys.path.insert(0, str(Path(__file__).parent))
from offload_lightning import QUIET
from watched_ways import WAYS, Way

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
STEPS, CHANGED = 6, 4


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
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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
    eager = [str(one.message) for one in said if "trains eagerly" in str(one.message)]
    assert all(torch.equal(planned[key], plain[key]) for key in plain), eager
    print(name, "|", eager or "planned")
