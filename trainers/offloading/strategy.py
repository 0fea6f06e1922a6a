"""`L.Trainer(strategy=OffloadStrategy(budget="8GiB"))` trains an unchanged module."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.optim import Optimizer

from offload import OffloadError, Plan
from offload.estimating.estimate import Asked, Estimate
from offload.live.session import OnPart
from offload.running.runner_memory import Migration
from trainers.offloading.check_cards import check_cards
from trainers.offloading.guests import Loss
from trainers.offloading.moves import UNCHANGED
from trainers.offloading.planned_strategy import PlannedStrategy
from trainers.one_device import OneDeviceStrategy
from trainers.sharing.high_priority import HighPriority
from trainers.steps.meter import MeasuredPlan, TimeSpent
from trainers.steps.target import Target


class OffloadStrategy(PlannedStrategy, OneDeviceStrategy):
    """Plans and offloads the steps, which one process runs on the trainer's devices.

        strategy = OffloadStrategy(budget="8GiB")
        trainer = L.Trainer(strategy=strategy, accelerator="auto", devices=1, max_epochs=3)
        trainer.fit(module, train_loader)

    The losses are those of plain Lightning on one device, bit for bit. What does not fit waits in
    host memory. `Trainer(devices=4)`, or `devices=4` here, spreads each step over four devices.

    memory     budget: the bytes of each device that a step may take ("8GiB"), or the share of
               what it needs ("80%"); None: no limit. host_budget: the most that waits on the host
    means      recompute: "auto" may compute activations again, "never" keeps them; optimizer:
               where updates run, "auto", "device" or "host"; engine: who runs the plan
    checks     verify: prove each plan
    restarts   plan_cache: a folder for plans, so that the next start does not search again
    """

    strategy_name = "offload"

    def __repr__(self) -> str:
        request = self._run.request
        return (
            f"OffloadStrategy(budget={request.budget!r}, host_budget={request.host_budget!r},"
            f" recompute={request.recompute!r}, optimizer={request.optimizer!r},"
            f" engine={request.engine!r}, devices={request.devices})"
        )

    def _take_several(self, devices: Sequence[torch.device]) -> None:
        request, count = self._run.request, len(devices)
        if request.devices not in (1, count):
            raise OffloadError(
                f"OffloadStrategy(devices={request.devices}) and Trainer(devices={count}) differ:"
                " name the devices once"
            )
        if self._has_device:
            raise OffloadError(
                f"OffloadStrategy(device='{self.root_device}') and Trainer(devices={count}) differ:"
                " give Trainer(devices=1), and devices= to the strategy"
            )
        numbers = [device.index for device in devices]
        if devices[0].type == "cuda" and numbers != [*range(numbers[0], numbers[0] + count)]:
            raise OffloadError(
                f"OffloadStrategy runs on devices that follow each other, and the trainer's are"
                f" {numbers}: hide the others with CUDA_VISIBLE_DEVICES"
            )
        self._run.request = replace(request, devices=count)

    def setup_environment(self) -> None:
        launcher = TorchElasticEnvironment()
        if launcher.detect() and launcher.world_size() > 1:
            raise OffloadError(
                "OffloadStrategy trains in one process, and torchrun has started"
                f" {launcher.world_size()}, each of which would train the same run by itself:"
                " start one without torchrun, or train on several machines with ElasticStrategy"
            )
        super().setup_environment()

    # ---- what a user reads -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the largest part of a step. It exists after the first step."""
        return self._run.plan

    def explain(self) -> str:
        """Explain the plan on one screen of text, with what requests of high priority took."""
        return "\n".join([self.plan.explain(), *self._run.guests.explain()])

    @property
    def spent(self) -> TimeSpent:
        """The time that the planned steps of this fit took so far, and how long they waited."""
        return self._run.meter_now().spent

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """The plans that ran, and the time that their runs took."""
        return self._run.meter_now().plans

    @property
    def planned_steps(self) -> int:
        """How many steps of this fit ran by plans, in all their parts."""
        return self._run.session.planned_steps

    @property
    def target(self) -> Target:
        """The device, engine and rates of the last run."""
        return self._run.request.target

    def plan_for(self, batch: Any, batch_idx: int = 0) -> Plan | None:
        """Return the plan of an update with this batch, of which no kernel runs; None if this run
        trains eagerly. The trainer cannot go on afterwards, because its Python has run."""
        if self._run.is_eager:
            return None
        return self._run.plan_for(batch, batch_idx, self.optimizers, self.root_device)

    def check(
        self,
        module: L.LightningModule,
        loader: Iterable[Any],
        cards: Sequence[str],
        *,
        steps: int = 1000,
        hours: float | None = None,
        price: Mapping[str, float] | None = None,
        **trainer: Any,
    ) -> Estimate:
        """Estimate a training step on cards that need not be here, and of which nothing is made:
        `strategy.check(module, loader, ["rtx4090", "2xh100"], precision="bf16-mixed")`.

        `cards`: names, or card files of `perfect-card measure`. `steps`, `hours`: how many steps
        there are, and how long they may take. `price`: what an hour of a card costs. `trainer`:
        arguments of `L.Trainer` that change a step. The module is left alone, and may be on
        `meta`. The loader is timed on this machine."""
        asked = Asked(steps, hours, dict(price or {}))
        return check_cards(module, loader, cards, asked, self._parts.count, **trainer)

    @staticmethod
    def estimate(
        module: L.LightningModule,
        batch: Any,
        card: str,
        budget: str | int | None = None,
        **trainer: Any,
    ) -> Estimate:
        """Estimate a step with this batch on a card, within a `budget` of its memory."""
        return check_cards(module, [batch], [card], Asked(), budget=budget, **trainer)

    def watch_parts(self, on_part: OnPart | None) -> None:
        """Have the next steps show their parts before kernels run; None: no longer."""
        self._run.session.watch_parts(on_part)

    def high_priority(
        self,
        net: torch.nn.Module,
        budget: str | int | None = None,
        *,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        priority: int = 0,
        seed: int = 0,
    ) -> HighPriority:
        """Return what answers requests by `net` between two nodes of this run's steps, from any
        thread: `with strategy.high_priority(net, budget="1GiB") as serve: y = serve(x)`.

        `budget`: its bytes of the device. `loss` and `optimizer` make it a training job: each call
        is a step, and returns the loss. The highest `priority` comes first. `seed`: of its random
        numbers."""
        live = self._run.session.live
        if live is not None:  # a guest has a generator of its own: nothing else may draw then
            live.kernels.forbid_overlap()
        has_budget = self._run.request.budget is not None
        return self._run.guests.admit(net, budget, loss, optimizer, priority, seed, has_budget)

    def move_to(
        self,
        budget: str | int | None = UNCHANGED,
        device: torch.device | str | None = None,
        devices: int | None = None,
    ) -> Future[Migration]:
        """Have the training go on within another budget, on another device, or on more or fewer
        `devices`. Any thread may call this while the trainer fits. The tensors move between two
        steps. The result has the bytes that moved and the seconds that it took, or raises
        `MemoryTooSmall` where there was no room, or `BudgetTooSmall` where there was no plan: then
        nothing has moved.

        Another budget or number of devices: the plan is made here, and all bits stay the same.
        Another `device`: on a GPU like the one before all bits stay the same. On another kind of
        device the weights are equal at the move, and a warning says that later bits are the new
        device's."""
        return self._moves.add(budget, device, devices, self.root_device, self.precision_plugin)
