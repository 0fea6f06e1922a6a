"""hivemind: a collaborative optimizer over a hash table of peers."""

import time
from pathlib import Path

import hivemind  # pyright: ignore[reportMissingImports]: in a venv of its own
import torch
from common import BATCH, Notes, batch, loss_of, meet, net, settings

LOOKS_SECONDS = 0.5
"""A micro-batch takes so long: peers look at each other's progress twice a second, and whoever is
faster trains alone."""


def main() -> None:
    given = settings()
    first = Path(given["first"])
    if given["rank"] == 0:
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        part = first.with_suffix(".part")
        part.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        part.rename(first)
    else:
        while not first.exists():
            time.sleep(0.05)
        known = first.read_text().splitlines()
        dht = hivemind.DHT(initial_peers=known, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    model = net(given["width"])
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="run", batch_size_per_step=BATCH, target_batch_size=3 * BATCH,
        params=list(model.parameters()), optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        matchmaking_time=given.get("matchmaking", 3.0), use_local_updates=False, verbose=False,
    )  # fmt: skip
    notes, step, micro = Notes(given["out"]), 0, 0
    optimizer.load_state_from_peers()
    meet(given["out"], given["peers"])
    optimizer.tracker.report_local_progress(0, 1)  # Without a sample nothing is reported.
    while optimizer.tracker.global_progress.num_peers < given["peers"]:
        time.sleep(0.1)
    while step < given["steps"]:
        time.sleep(LOOKS_SECONDS)
        loss_of(model, batch(given["rank"], micro)).backward()
        micro += 1
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.local_epoch > step:
            step = optimizer.local_epoch
            notes.step(step, model, peers=optimizer.tracker.global_progress.num_peers)


if __name__ == "__main__":
    main()
