"""Guests that are there when a training ends: its memory is given back without them."""

import threading
import time
from contextlib import nullcontext

import lightning as L
import pytest

from benchmarks.jobs.fleet_jobs import KINDS, QUIET
from offload.live.session import LiveSession
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
PATIENCE = 60.0


@pytest.mark.parametrize("fails", [False, True])
def test_no_guest_is_in_the_borrowed_memory_while_the_training_gives_it_back(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = OffloadStrategy(budget="60%")
    leave, inside, seen = LiveSession.__exit__, threading.Event(), list[bool]()

    def leaves(session: LiveSession, *error: object) -> None:
        seen.append(inside.wait(0.2))
        leave(session, *error)

    def guest() -> None:
        with strategy._run.gate.granted(inside=True):
            inside.set()
            time.sleep(0.3)
            inside.clear()

    class Last(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            asks.start()
            until = time.monotonic() + PATIENCE
            while not strategy._run.gate._waiting:
                assert time.monotonic() < until
                time.sleep(1e-3)
            if fails:
                raise ValueError("the end")

    asks = threading.Thread(target=guest)
    monkeypatch.setattr(LiveSession, "__exit__", leaves)
    kind = KINDS["adam"]
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Last()],
    )  # fmt: skip
    with pytest.raises(ValueError, match="the end") if fails else nullcontext():
        trainer.fit(kind.module(), kind.train(), kind.val())
    asks.join(PATIENCE)
    assert seen and not any(seen)
