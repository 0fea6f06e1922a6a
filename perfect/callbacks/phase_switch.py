"""`PhaseSwitch` is the callback that applies what `PhasePolicy` decides.

It works with any LightningModule that has one optimizer and, as its train loader, a `ReuseLoader`
or a view of a `SharedStream`. In a swarm (`ElasticStrategy`) all peers switch at the same step:

    setup         find the loader; tell the trainer how many steps all phases take
    batch start   set learning rate and seed, which depend on the step only, so a resume continues
    batch end     count; update the moving average; add the loss of first serves
    validation    use averaged weights; give the results to the policy (rank 0 decides for all)
    epoch end     = end of a pass: ask the policy; set the loader's next reuse, batch size, length
    checkpoint    has the loader's state; of one between a pass's last batch and its end, train
                  start makes up for the end

Lightning's epoch is a pass. Lightning reads a loader's length once, so if a phase changes it, the
callback makes the fit loop read it again.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn

from loaders.order.keyed_permutation import samples_per_rank
from perfect.callbacks.ema import AverageOfWeights, Ema
from perfect.callbacks.loader_callback import LoaderCallback
from perfect.callbacks.phase_records import (
    FirstServeLoss,
    GivenSettings,
    PassState,
    PhaseRecord,
    record_step,
)
from perfect.callbacks.train_loaders import (
    TrainLoader,
    batches_of_pass,
    decoded_by_all,
    find_train_loader,
    is_in_a_pass,
    limited,
)
from perfect.method.phases import Observation, Phase, PhaseError, PhasePolicy, PlateauRule
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.lightning_seams import forget_loader

log = logging.getLogger(__name__)

LIGHTNING_DEFAULT = 1000
"""max_epochs of a Trainer that was given neither max_epochs nor max_steps."""


class PhaseSwitch(L.Callback):
    """Runs a list of phases. `monitor` names the logged accuracy (0 to 1) on held-out samples."""

    def __init__(
        self,
        phases: Sequence[Phase],
        plateau: PlateauRule | None = None,
        monitor: str = "val_accuracy",
        ema_decay: float = 0.999,
        validate_every: float | None = None,
    ) -> None:
        """`validate_every` is in epoch-equivalents; None leaves validation to the Trainer."""
        self.policy = PhasePolicy(phases, plateau)
        self.monitor = monitor
        self.validate_every = validate_every
        self.records: list[PhaseRecord] = []
        self.loader: TrainLoader | None = None
        self.restored_loader = False
        """Whether the loader continues where a checkpoint left it. A `LoaderCallback` asks."""
        self._average = AverageOfWeights(ema_decay)
        self._restored = False
        """Whether a state was loaded that the trainer does not know yet."""
        self._given = GivenSettings()
        self._pass = PassState()
        self._first_serves = FirstServeLoss()
        self._carrier = LoaderCallback(same_steps=False)

    @property
    def ema(self) -> Ema | None:
        """The moving average of the weights; None if no phase has begun one."""
        return self._average.ema

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise PhaseError(
                "PhaseSwitch drives the one optimizer of automatic optimization, but"
                f" {type(pl_module).__name__} optimizes manually: leave automatic_optimization True"
            )
        self.loader = find_train_loader(trainer)
        self._given.batch_size = self.loader.batch_size
        self._given.accumulate = trainer.accumulate_grad_batches
        # The loader cuts passes short, so that Lightning does not cut them a second time.
        self._given.limit_batches, trainer.limit_train_batches = trainer.limit_train_batches, 1.0
        if trainer.max_steps != -1 or trainer.max_epochs not in (None, -1, LIGHTNING_DEFAULT):
            log.warning(
                "max_epochs and max_steps have no effect: the phases say how long training takes"
            )
        self._given.log_every = max(1, getattr(trainer, "log_every_n_steps", 50))
        self._announce_length(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise PhaseError(
                f"PhaseSwitch drives one optimizer, but {type(pl_module).__name__} has"
                f" {len(trainer.optimizers)}: return one from configure_optimizers"
            )
        if trainer.lr_scheduler_configs and any(p.lr for p in self.policy.phases):
            raise PhaseError(
                f"both {type(pl_module).__name__}.configure_optimizers and the phases set the"
                " learning rate: remove the module's lr_scheduler, or `lr` from every phase"
            )
        if trainer.lr_scheduler_configs and self.policy.plateau is not None:
            raise PhaseError(
                "a plateau can only be detected under a constant learning rate: remove"
                f" {type(pl_module).__name__}'s lr_scheduler and give the phases an lr"
            )
        # No checkpoint has restored the optimizer yet, so these are the module's own values.
        groups = trainer.optimizers[0].param_groups
        self._given.lrs = [group["lr"] for group in groups]
        self._given.decays = [group.get("weight_decay", 0.0) for group in groups]
        if any(p.lr for p in self.policy.phases) and not self._given.lrs[0]:
            raise PhaseError(
                "the learning rate of the optimizer's first group is 0, but phases scale all groups"
                " by it: give it a learning rate above 0"
            )
        if any(p.weight_decay for p in self.policy.phases) and not any(self._given.decays):
            raise PhaseError(
                "a phase sets weight_decay, but no parameter group of the optimizer has one: give"
                " weight_decay to the groups that should decay"
            )
        self._begin_or_resume(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._restored:  # Some strategies restore states only after on_fit_start.
            self._begin_or_resume(trainer, pl_module)
        if not isinstance(self._require_loader(), LaneShares):  # which a swarm deals
            self.restored_loader = self._carrier.restore(trainer)
        if self._pass.owes_end:
            self._end_pass(trainer)
            trainer.fit_loop.setup_data()  # others ask for the loader before the epoch begins

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(self._require_loader(), LaneShares):  # which a swarm deals
            self._carrier.on_train_epoch_start(trainer, pl_module)

    def _begin_or_resume(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the run, or go on with it as the loaded state says."""
        self._restored = False
        self._average.restore(pl_module)
        self._announce_length(trainer)
        self._prepare_pass(trainer, resuming=self._pass.limit is not None)

    def _announce_length(self, trainer: L.Trainer) -> None:
        """Set trainer.estimated_stepping_batches, and the end of training, to all phases' steps."""
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.epoch_loop.max_steps = self.total_steps

    @property
    def total_steps(self) -> int:
        """The optimizer steps of the whole run: those that are done and those still planned."""
        state, policy = self.policy.state, self.policy
        ahead = sum(self.planned_steps(phase) for phase in policy.phases[state.index :])
        return state.total_steps - state.step + ahead

    def planned_steps(self, phase: Phase) -> int:
        if phase.steps is not None:
            return phase.steps
        assert phase.passes is not None  # check_phases
        size = phase.batch_size or self._given.batch_size
        batches = batches_of_pass(self._require_loader(), size, phase.reuse)
        batches = limited(batches, self._given.limit_batches)
        return phase.passes * -(-batches // self._given.accumulate)

    def _prepare_pass(self, trainer: L.Trainer, resuming: bool = False) -> None:
        """Set the loader up for the coming pass, and the trainer for its length."""
        loader, phase = self._require_loader(), self.policy.phase
        loader.set_reuse(
            phase.reuse,
            reaugment=phase.reaugment,
            batch_size=phase.batch_size or self._given.batch_size,
        )
        if not resuming:
            loader.limit_pass(None)
            self._pass.limit = limited(len(loader), self._given.limit_batches)
            if phase.steps is not None:
                left = (phase.steps - self.policy.state.step) * self._given.accumulate
                self._pass.limit = min(self._pass.limit, left)
        loader.limit_pass(self._pass.limit)
        if self.validate_every is not None:
            samples = samples_per_rank(len(loader.dataset), loader.world_size)
            every = self.validate_every * samples / loader.batch_size
            # The second is what Lightning makes of the first when it reads a loader's length.
            trainer.val_check_interval = trainer.val_check_batch = max(2, round(every))
        if len(loader) != self._pass.prepared_length:
            self._pass.prepared_length = len(loader)
            forget_loader(trainer)  # the fit loop reads the length again before the next pass

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        step, phase = self.policy.state.step, self.policy.phase
        # Each step has its own seed, so dropout draws the same after a kill, and no state is saved.
        seed = (self._require_loader().seed, trainer.fit_loop.total_batch_idx, trainer.global_rank)
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        lr = phase.lr.at_step(step, self.planned_steps(phase)) if phase.lr else self._given.lrs[0]
        rates = any(p.lr is not None for p in self.policy.phases)
        decays = any(p.weight_decay is not None for p in self.policy.phases)
        for number, group in enumerate(trainer.optimizers[0].param_groups):
            if rates:
                group["lr"] = lr * (self._given.lrs[number] / self._given.lrs[0])
            base = self._given.decays[number]
            if decays and base:  # a group without weight decay (biases, norms) stays without
                group["weight_decay"] = base if phase.weight_decay is None else phase.weight_decay
        self._pass.updates_seen = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loader = self._require_loader()
        assert loader.last_batch is not None, "a batch was trained"
        serves = loader.last_batch.serves  # 0 for a sample's first one in its pass
        stepped = trainer.global_step - self._pass.updates_seen
        share = samples_per_rank(len(loader.dataset), loader.world_size)
        record_step(
            self.records,
            self.policy.state.index,
            self.policy.phase,
            self._pass.updates_seen,  # the number of the step under way, in an accumulation too
            decoded_by_all(trainer, loader),
            trainer.optimizers[0].param_groups[0]["lr"],
        )
        self.policy.served(len(serves) / share, stepped)
        self._pass.owes_end = not is_in_a_pass(loader)
        if stepped and self.policy.phase.ema:
            self._average.update(pl_module)
        if self.policy.detector is not None:
            self._first_serves.add(outputs, serves == 0)
        if trainer.global_step % self._given.log_every == 0 and stepped:
            pl_module.log_dict(self._counters(trainer), on_step=True, on_epoch=False)

    def _counters(self, trainer: L.Trainer) -> dict[str, float]:
        loader = self._require_loader()
        # A peer of a swarm counts what it has served itself.
        ranks = 1 if isinstance(loader, LaneShares) else trainer.world_size
        return {
            "epochs": self.policy.state.at,
            "phase": float(self.policy.state.index),
            "reuse": float(self.policy.phase.reuse),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "decoded": float(decoded_by_all(trainer, loader)),
            "served": float(ranks * loader.stats.served),
            "stall_seconds": loader.stats.stall_seconds,
        }

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.policy.phase.ema and not trainer.sanity_checking:
            self._average.show(pl_module)

    on_test_start = on_validation_start

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._average.hide(pl_module)
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is None and self.policy.plateau is not None:
            raise PhaseError(
                f"the plateau rule watches '{self.monitor}', which validation did not log; it"
                f" logged {', '.join(sorted(trainer.callback_metrics)) or 'nothing'}: log"
                f" '{self.monitor}' in validation_step, or name another metric as monitor"
            )
        loss = self._first_serves.take_mean()
        seen = Observation(self.policy.state.at, None if value is None else float(value), loss)
        # The losses of the ranks differ, so all ranks take rank 0's observation.
        seen = trainer.strategy.broadcast(seen)
        if not self.policy.finished:
            done = self.policy.state.step / self.planned_steps(self.policy.phase)
            look = self.policy.observe(seen, done)
            if look.verdict is not None:
                log.info("plateau? %s: %s", look.phase, look.verdict.reason)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._average.hide(pl_module)

    @contextmanager
    def averaged(self, pl_module: L.LightningModule) -> Iterator[None]:
        """Give the module its final weights: the averages, if the last phase keeps an average."""
        if self.policy.phase.ema:
            self._average.show(pl_module)
        try:
            yield
        finally:
            self._average.hide(pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._pass.owes_end:  # after a resume at an epoch's end, Lightning ends it once more
            self._end_pass(trainer)

    def _end_pass(self, trainer: L.Trainer) -> None:
        self._pass.owes_end = False
        finished = self.policy.phase
        switch = self.policy.end_pass()
        if self.records:
            self.records[-1] = replace(self.records[-1], passes=self.records[-1].passes + 1)
        if switch is not None:
            log.info(
                "phase '%s' ends at epoch %.2f, step %d (%s: %s)",
                switch.left, switch.at, switch.step, switch.reason, switch.detail,
            )  # fmt: skip
            self.records[-1] = replace(self.records[-1], reason=f"{switch.reason}: {switch.detail}")
        if self.policy.finished:
            trainer.should_stop = True
            return
        if switch is not None and self.policy.phase.reset_optimizer:
            trainer.optimizers[0].state.clear()
        if self.policy.phase.ema and not finished.ema:
            self._average.clear()  # the last phase did not update it, so it starts anew
        self._announce_length(trainer)
        self._prepare_pass(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "records": [asdict(r) for r in self.records],
            "ema": self._average.state_dict(),
            "pass_limit": self._pass.limit,
            "owes_end": self._pass.owes_end,
            **self._carrier.state_dict(),
            **self._first_serves.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.policy.load_state_dict(state_dict["policy"])
        self.records = [PhaseRecord(**r) for r in state_dict["records"]]
        self._pass.limit = state_dict["pass_limit"]
        self._pass.owes_end = state_dict.get("owes_end", False)  # older versions do not say
        self._carrier.load_state_dict(state_dict)
        self._first_serves.load_state_dict(state_dict)
        self._average.load_state_dict(state_dict["ema"])
        self._restored = True

    def _require_loader(self) -> TrainLoader:
        assert self.loader is not None, "setup() finds the loader"
        return self.loader
