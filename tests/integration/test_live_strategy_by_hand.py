"""Steps that optimize by hand: plain Lightning's bits, gradients, states and schedules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from support import offload_lightning as ol
from support import offload_manual as om
from support.accelerators import GPU, kept_of_each, only_on_gpu, some_on_gpu

from offload.graph.memgraph import OFFLOAD
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
replayed = ol.replayed

KINDS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Any]]] = {
    "gan": (om.Gan, om.pictures),
    "gan that clears first": (om.ClearsFirst, om.pictures),
    "wasserstein gan": (om.Wasserstein, om.pictures),
    "accumulation, clipped by norm": (om.Accumulates, ol.data),
    "deep q": (om.DeepQ, om.experience),
    "penalty": (om.Penalized, om.pictures),
}


def run(name: str, strategy: Any, **more: Any) -> ol.Result:
    make, loader = KINDS[name]
    return ol.train(strategy, make, **{"loader": loader(), "validate": False, **more})


@kept_of_each
def plain(name: str) -> ol.Result:
    return run(name, "auto")


ON_GPU = (
    "gan that clears first", "accumulation, clipped by norm", "deep q", "penalty",
)  # fmt: skip
"""Those whose gradients, values and numbers go another way on a GPU: all within a budget."""


@some_on_gpu(KINDS, ON_GPU)
def test_a_step_by_hand_has_plain_lightnings_bits_and_gradients(
    name: str, accelerator: str
) -> None:
    # Half of them have a budget in which much has to move.
    share = "80%" if accelerator == GPU else "70%"  # updates of a GPU take more beside the tensors
    budget = share if [*KINDS].index(name) % 2 else None
    ours = run(name, OffloadStrategy(budget=budget))
    assert om.differences(plain(name), ours) == []
    assert ours.strategy.spent.runs > 0


def test_a_gan_in_its_smallest_budget_moves_weights_and_keeps_every_bit() -> None:
    make, loader = KINDS["gan"]
    least = ol.smallest(make=make, loader=loader(), validate=False)
    ours, free = run("gan", OffloadStrategy(budget=least)), run("gan", OffloadStrategy())
    assert om.differences(plain("gan"), ours) == []
    assert ours.strategy.plan.device_bytes <= least < free.strategy.plan.device_bytes
    assert any(node.kind == OFFLOAD for node in ours.strategy.plan.memgraph.nodes)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_gradient_scaler_has_plain_lightnings_bits() -> None:
    def scaled(strategy: Any, name: str) -> ol.Result:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # type: ignore[attr-defined]
        return run(name, strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

    for name in ("gan", "accumulation, clipped by norm"):
        ours = scaled(OffloadStrategy(budget="80%"), name)
        assert om.differences(scaled("auto", name), ours) == []


# ---- between two steps --------------------------------------------------------------------------


class Clears(L.Callback):
    """Who looks at gradients between two steps finds plain Lightning's, and may clear them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = {n: p.grad for n, p in pl_module.named_parameters()}
        self.seen.append({n: None if g is None else g.clone() for n, g in found.items()})
        if batch_idx == 2:
            trainer.optimizers[0].zero_grad()
        if batch_idx == 3:
            for p in pl_module.parameters():
                p.grad = torch.ones_like(p)


@some_on_gpu(["accumulation, clipped by norm", "gan that clears first"], ["gan that clears first"])
def test_gradients_between_two_steps_are_plain_lightnings(name: str, accelerator: str) -> None:
    one, other = Clears(), Clears()
    expected = run(name, "auto", callbacks=[one])
    ours = run(name, OffloadStrategy(budget="90%"), callbacks=[other])
    assert om.differences(expected, ours) == []
    assert om.unequal("gradients", one.seen, other.seen) == []
    # What is cleared at the step's beginning changes nothing, what is added up does.
    assert bool(om.differences(plain(name), expected)) == name.startswith("accumulation")


@some_on_gpu(["gan", "accumulation, clipped by norm"], ["accumulation, clipped by norm"])
def test_validation_between_steps_changes_nothing(name: str, accelerator: str) -> None:
    class Validated(KINDS[name][0]):  # type: ignore[misc]
        def val_dataloader(self) -> Any:
            return KINDS[name][1]()

    def fit(strategy: Any) -> ol.Result:
        more = {"val_check_interval": 2, "num_sanity_val_steps": 1, "validate": False}
        return ol.train(strategy, Validated, loader=KINDS[name][1](), **more)

    assert om.differences(fit("auto"), fit(OffloadStrategy(budget="90%"))) == []


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@some_on_gpu(["gan", "wasserstein gan", "accumulation, clipped by norm"], ["wasserstein gan"])
def test_a_run_goes_on_from_its_checkpoint_as_plain_lightning_does(
    name: str, accelerator: str, tmp_path: Path
) -> None:
    found: list[ol.Result] = []
    for number, strategy in enumerate((lambda: "auto", lambda: OffloadStrategy(budget="90%"))):
        folder = tmp_path / str(number)
        keeps = ModelCheckpoint(folder, filename="one", save_top_k=-1, every_n_epochs=1)
        run(name, strategy(), max_epochs=1, callbacks=[keeps], enable_checkpointing=True)
        found.append(run(name, strategy(), max_epochs=3, ckpt_path=str(folder / "one.ckpt")))
    assert om.differences(*found) == []
    other = str(tmp_path / "1" / "one.ckpt")  # ours goes on in plain Lightning
    assert om.differences(found[0], run(name, "auto", max_epochs=3, ckpt_path=other)) == []


class Moves(L.Callback):
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 0 and batch_idx == 3:
            self.move = trainer.strategy.move_to(budget="80%")


@some_on_gpu(
    ["gan", "accumulation, clipped by norm", "gan that clears first"], ["gan that clears first"]
)
def test_a_run_moves_to_another_budget(name: str, accelerator: str) -> None:
    moves = Moves()
    ours = run(name, OffloadStrategy(budget="100%"), callbacks=[moves])
    assert moves.move.result().nbytes > 0
    assert om.differences(plain(name), ours) == []


# ---- refused, and on a GPU ----------------------------------------------------------------------


class Stale(om.ByHand):
    """The generator's loss was made before the critic has stepped: autograd finds that out."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.both()
        loss = self.judged(self.generator(self.noise(batch[0])), True)
        of_critic.zero_grad()
        self.manual_backward(self.judged(batch[0], True))
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()


def test_what_plain_lightning_refuses_is_refused_here_too() -> None:
    for strategy in ("auto", OffloadStrategy(), OffloadStrategy(budget="1MiB")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ol.train(strategy, Stale, loader=om.pictures(), validate=False)


@only_on_gpu
def test_steps_by_hand_are_replayed(accelerator: str, replayed: list[Any]) -> None:
    for name in ("gan", "accumulation, clipped by norm"):
        ours = run(name, OffloadStrategy(budget="80%", engine="cudagraph"), max_epochs=4)
        assert om.differences(run(name, "auto", max_epochs=4), ours) == []
    assert replayed


@only_on_gpu
def test_a_step_by_hand_updates_on_the_host_to_the_weights_of_a_gpu_but_for_rounding(
    accelerator: str,
) -> None:
    """As users have it: `optimizer="auto"`."""
    ours = run("deep q", OffloadStrategy(budget="80%", optimizer="auto"))
    weights = plain("deep q").module.state_dict()
    torch.testing.assert_close(ours.module.state_dict(), weights, rtol=1e-6, atol=1e-7)
