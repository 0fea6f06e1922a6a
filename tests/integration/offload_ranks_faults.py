"""What test_offload_ddp_faults.py runs in two processes: something goes wrong on rank 1.

LOCAL_RANK=1 ... python offload_ranks_faults.py FAULT FOLDER     prints how the fit ended
"""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import offload_lightning as ol

from trainers import OffloadDDPStrategy

AT = 4
"""So many steps go well."""


class Late(ol.Module):
    """From step `AT` on, rank 1's batches cannot be planned, or train other parameters."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.asks = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == AT:
            print("trains", flush=True)
        if self.global_rank != 1 or self.trainer.global_step < AT:
            return
        if self.fault == "freezes":
            self.head.bias.requires_grad_(False)
        if self.fault == "asks":
            self.asks = True
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "raises":
            raise KeyError("rank 1's own mistake")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.asks and loss > 0:
            self.log("positive", 1.0)
        return loss


def main(fault: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    strategy = OffloadDDPStrategy(budget="80%", timeout=timedelta(minutes=5))
    ol.train(
        strategy, lambda: Late(fault), devices=2, max_epochs=5000, validate=False,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BaseException as error:
        print(f"ended by {type(error).__name__}: {error}", flush=True)
        raise
