"""A list of the module that an evaluation step reads is plain Lightning's, whoever reads it."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol

from trainers import OffloadStrategy

pytestmark = [
    pytest.mark.filterwarnings(line)
    for line in (
        *ol.QUIET,
        "ignore:OffloadStrategy validates on the host",
        "ignore:OffloadStrategy has captured and planned the evaluation 3 times",
    )
]
Read = Callable[[list[Any]], Any]


def seen(strategy: Any, read: Read, in_step: bool) -> list[float]:
    """What each validation step made of the list, which grows in the step or after it."""

    class Remembers(ol.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bank: list[Any] = [torch.ones(5)]
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch[0]).mean(0)
            made = out.sum() + read(self.bank)
            if in_step:
                self.bank.append(out)
            return made

        def on_validation_batch_end(
            self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.seen.append(outputs.item())
            if not in_step:
                self.bank.append(torch.ones(5))

    torch.manual_seed(0)
    module = Remembers()
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.validate(module, ol.data(24), verbose=False)
    return module.seen


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        lambda bank: torch.stack(bank).sum(),
        lambda bank: len(bank + [1]),  # noqa: RUF005
        lambda bank: len([1] + bank),  # noqa: RUF005
        lambda bank: len(bank * 2),
        lambda bank: len(bank.copy()),
        lambda bank: len([*reversed(bank)]),
        lambda bank: len(repr(bank)) // 60,
        lambda bank: bank == [],
        len,
    ],
    ids=["stack", "+", "+ on the right", "*", "copy", "reversed", "repr", "==", "len"],
)
def test_a_list_that_grows_is_read_as_it_is_at_each_step(read: Read, in_step: bool) -> None:
    assert seen(OffloadStrategy(), read, in_step) == seen("auto", read, in_step)
