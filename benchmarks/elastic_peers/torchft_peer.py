"""torchft: a quorum a step, its lighthouse as coordinator. Each peer is a replica group of one."""

import os
from datetime import timedelta

import torch
from common import Notes, batch, loss_of, net, settings
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft import (  # pyright: ignore[reportMissingImports]: in a venv of its own
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.ddp import (  # pyright: ignore[reportMissingImports]: in a venv of its own
    DistributedDataParallel,
)


def main() -> None:
    given = settings()
    os.environ["TORCHFT_LIGHTHOUSE"] = given["lighthouse"]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = net(given["width"])
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"peer{given['rank']}", store_addr="localhost", store_port=store.port,
        rank=0, world_size=1, timeout=timedelta(seconds=10),
    )  # fmt: skip
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    notes = Notes(given["out"])
    while manager.current_step() < given["steps"]:
        optimizer.zero_grad()
        loss_of(wrapped, batch(given["rank"], manager.current_step())).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            notes.step(manager.current_step(), model, peers=manager.num_participants())


if __name__ == "__main__":
    main()
