"""Steps that optimize by hand: one planned graph, and plain Lightning's bits."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import offload_lightning as ol
from support import offload_manual as om
from support.accelerators import GPU, here, kept_of_each, some_on_gpu

from offload import Plan
from offload.graph.memgraph import OFFLOAD
from trainers import OffloadStrategy
from trainers.offloading.steps.comparison import DifferenceFound
from trainers.offloading.steps.manual_steps import ManualSteps

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
replayed = ol.replayed

KINDS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Any]]] = {
    "gan": (om.Gan, om.pictures),
    "gan that clears first": (om.ClearsFirst, om.pictures),
    "wasserstein gan": (om.Wasserstein, om.pictures),
    "accumulation, clipped by norm": (om.Accumulates, ol.data),
    "accumulation, clipped by value": (om.AccumulatesByValue, ol.data),
    "deep q": (om.DeepQ, om.experience),
    "hooks": (om.Hooked, om.pictures),
    "penalty": (om.Penalized, om.pictures),
    "flags": (om.Flagged, om.pictures),
    "torch's optimizers": (om.Raw, om.pictures),
    "shared parameters": (om.Shared, om.pictures),
    "two steps of one optimizer": (om.Twice, om.pictures),
    "two schedules": (om.Scheduled, om.pictures),
    "a schedule that is given a loss": (om.Plateaued, om.pictures),
    "asks first": (om.AsksFirst, om.pictures),
    "numbers": (om.Counting, om.pictures),
}
STEPS: dict[str, int] = {
    **dict.fromkeys(KINDS, 20),
    **dict.fromkeys(
        ("deep q", "penalty", "a schedule that is given a loss", "asks first", "numbers"), 10
    ),
    **dict.fromkeys(("accumulation, clipped by norm", "accumulation, clipped by value"), 6),
    "wasserstein gan": 12,
    "torch's optimizers": 0,
}
"""What Lightning counts as `global_step`."""


def run(name: str, strategy: Any, **more: Any) -> ol.Result:
    make, loader = KINDS[name]
    return ol.train(strategy, make, **{"loader": loader(), "validate": False, **more})


@kept_of_each
def plain(name: str) -> ol.Result:
    return run(name, "auto")


def copied(plan: Plan) -> int:
    return sum(node.nbytes for node in plan.memgraph.nodes if node.kind == OFFLOAD)


ON_GPU = (
    "gan that clears first", "accumulation, clipped by norm", "deep q", "penalty", "numbers",
)  # fmt: skip
"""Those whose gradients, values and numbers go another way on a GPU: all within a budget."""


@some_on_gpu(KINDS, ON_GPU)
@pytest.mark.filterwarnings("ignore:.*captured and planned the step 3 times")
def test_a_step_by_hand_is_planned_with_plain_lightnings_bits(name: str, accelerator: str) -> None:
    # Half of them have a budget in which much has to move.
    share = "80%" if accelerator == GPU else "70%"  # updates of a GPU take more beside the tensors
    budget = share if [*KINDS].index(name) % 2 else None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*eagerly")
        ours = run(name, OffloadStrategy(budget=budget))
    assert om.differences(plain(name), ours) == []
    twice = ours.strategy.spent.runs - len(ours.rates)
    assert twice > 0 if accelerator == GPU else twice == 0  # a GPU's first steps run twice
    assert ours.trainer.global_step == STEPS[name]


def test_a_gan_in_its_smallest_budget_moves_weights_and_keeps_every_bit() -> None:
    make, loader = KINDS["gan"]
    least = ol.smallest(make=make, loader=loader(), validate=False)
    ours = run("gan", OffloadStrategy(budget=least))
    assert om.differences(plain("gan"), ours) == []
    assert ours.strategy.plan.device_bytes <= least < plan_of("gan").device_bytes
    assert copied(ours.strategy.plan) > 0


@functools.cache
def plan_of(name: str) -> Plan:
    return run(name, OffloadStrategy()).strategy.plan


def test_updates_stand_where_the_step_calls_them_and_later_tasks_read_what_they_wrote() -> None:
    graph = plan_of("gan").source
    first = next(n for n, task in enumerate(graph.tasks) if "update" in task.name)
    written = {b for b in graph.tasks[first].writes if graph.buffers[b].role.value == "parameter"}
    assert written and any(written & {*task.reads} for task in graph.tasks[first + 1 :])
    assert sum(task.phase == "forward" for task in graph.tasks[first:]) > 3


def test_without_the_comparison_every_step_is_the_graphs_own() -> None:
    for name in ("gan", "accumulation, clipped by norm", "wasserstein gan"):
        ours = run(name, OffloadStrategy(budget="70%"))
        assert om.differences(plain(name), ours) == []


def test_each_behaviour_has_one_graph_however_often_it_comes() -> None:
    ours = run("wasserstein gan", OffloadStrategy(), max_epochs=6)
    # In an epoch: of the critic, or of both; and gradients that are there or not.
    assert len(ours.strategy.plans) <= 5
    assert om.differences(run("wasserstein gan", "auto", max_epochs=6), ours) == []


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
        if trainer.fit_loop.epoch_loop.batch_idx == 2:
            trainer.optimizers[0].zero_grad()
        if trainer.fit_loop.epoch_loop.batch_idx == 3:
            for p in pl_module.parameters():
                p.grad = torch.ones_like(p)


@some_on_gpu(["accumulation, clipped by norm", "gan that clears first"], ["gan that clears first"])
def test_gradients_between_two_steps_are_plain_lightnings(name: str, accelerator: str) -> None:
    one, other = Clears(), Clears()
    expected = run(name, "auto", callbacks=[one])
    # A GPU within a budget may have no gradient to show there (offload/manual-optimization.md).
    budget = None if accelerator == GPU else "90%"
    ours = run(name, OffloadStrategy(budget=budget), callbacks=[other])
    assert om.differences(expected, ours) == []
    assert om.unequal("gradients", one.seen, other.seen) == []
    # What is cleared at the step's beginning changes nothing, what is added up does.
    assert bool(om.differences(plain(name), expected)) == name.startswith("accumulation")


@some_on_gpu(["gan", "accumulation, clipped by norm"], ["accumulation, clipped by norm"])
def test_validation_between_steps_changes_nothing(name: str, accelerator: str) -> None:
    options: dict[str, Any] = {"val_check_interval": 2, "validate": False}
    make, loader = KINDS[name]

    def fit(strategy: Any) -> ol.Result:
        torch.manual_seed(3)
        module, rates = make(), ol.Rates()
        torch.manual_seed(4)
        trainer = L.Trainer(
            max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=1, **here(),
            strategy=strategy, callbacks=[rates], val_check_interval=options["val_check_interval"],
        )  # fmt: skip
        trainer.fit(module, loader(), loader())
        logged = {**trainer.callback_metrics}
        return ol.Result(module, trainer, trainer.strategy, logged, rates.rates)

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


# ---- the net under it ---------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, "1MiB"])
def test_a_step_that_does_something_else_than_plain_lightning_is_found(
    budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ManualSteps.run

    def wrong(self: ManualSteps, step: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = real(self, step, *args, **kwargs)
        for p in [*step.holds][:1]:
            with torch.no_grad():
                self.sums[p].view(-1)[0] += 1e-3
        return outputs

    monkeypatch.setattr(ManualSteps, "run", wrong)
    if budget:
        with pytest.raises(DifferenceFound, match=r"the gradient of .* differs"):
            run("gan that clears first", OffloadStrategy(budget=budget))
        return
    with pytest.warns(UserWarning, match="trains eagerly.*the gradient of .* differs"):
        ours = run("gan that clears first", OffloadStrategy())
    assert om.differences(plain("gan that clears first"), ours) == []


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("accelerator", [GPU], indirect=True)
def test_steps_by_hand_are_replayed(accelerator: str, replayed: list[Any]) -> None:
    for name in ("gan", "accumulation, clipped by norm"):
        before = len(replayed)
        ours = run(name, OffloadStrategy(budget="80%", engine="cudagraph"), max_epochs=4)
        assert om.differences(run(name, "auto", max_epochs=4), ours) == []
        assert len(replayed) > before


@pytest.mark.gpu
@pytest.mark.parametrize("accelerator", [GPU], indirect=True)
def test_a_step_by_hand_updates_on_the_host_to_the_weights_of_a_gpu_but_for_rounding(
    accelerator: str,
) -> None:
    """As users have it: `optimizer="auto"`, and the first steps are compared."""
    ours = run("deep q", OffloadStrategy(budget="80%", optimizer="auto"))
    weights = plain("deep q").module.state_dict()
    torch.testing.assert_close(ours.module.state_dict(), weights, rtol=1e-6, atol=1e-7)
