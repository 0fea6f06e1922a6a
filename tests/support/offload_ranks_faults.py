"""What test_offload_ddp_faults.py runs in two processes: something goes wrong on rank 1.

LOCAL_RANK=1 ... python offload_ranks_faults.py FAULT STEP     prints how the fit ended
"""

import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from support import offload_lightning as ol

from trainers import OffloadDDPStrategy


class Late(ol.Module):
    """From step `at` on, something goes wrong on rank 1."""

    def __init__(self, fault: str, at: int) -> None:
        super().__init__()
        self.fault = fault
        self.at = at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.at:
            print("trains", flush=True)
        if self.global_rank != 1 or self.trainer.global_step < self.at:
            return
        if self.fault == "freezes":
            self.head.bias.requires_grad_(False)
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "raises":
            raise KeyError("rank 1's own mistake")


def main(fault: str, at: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    strategy = OffloadDDPStrategy(budget="80%", timeout=timedelta(minutes=5))
    make = partial(Late, fault, at)
    ol.train(strategy, make, devices=2, max_epochs=5000, validate=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except BaseException as error:
        said = " ".join([f"{error}", *getattr(error, "__notes__", [])])
        print(f"ended by {type(error).__name__}: {said}", flush=True)
        raise
