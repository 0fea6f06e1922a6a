"""torchrun: one worker of one agent. A death restarts all, from the newest checkpoint there is."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from common import Notes, batch, loss_of, net, settings
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    given = settings()
    Path(given["out"]).mkdir(parents=True, exist_ok=True)
    Path(given["out"], "worker").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    model = net(given["width"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    saved, step = Path(given["checkpoint"]), 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    wrapped, notes = DistributedDataParallel(model), Notes(given["out"])
    while step < given["steps"]:
        optimizer.zero_grad()
        loss_of(wrapped, batch(dist.get_rank(), step)).backward()
        optimizer.step()
        step += 1
        notes.step(step, model, peers=dist.get_world_size())
        if dist.get_rank() == 0 and step % given["every"] == 0:
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step
            }  # fmt: skip
            torch.save(state, saved.with_suffix(".part"))
            saved.with_suffix(".part").rename(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
