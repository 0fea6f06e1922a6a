"""What Lightning sees of elastic training, wherever the commits come from.

One batch of Lightning's is this process's share of a global step. The rest of a run is as usual,
and equal at every peer: `global_step`, schedulers, validation, checkpoints, callbacks.

    training_step   the commit of the step: lanes, reduce, vote (peer/swarm_commits.py)
    backward        the commit's mean gradient becomes the parameters' .grad
    optimizer_step  Lightning clips and updates; then the step is applied, and the lanes advance
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn, get_args

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from offload import Plan
from trainers.atomic_checkpoint import AtomicCheckpointIO
from trainers.elastic.deciding.view import Added
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.lane_shares import LaneShare, LaneShares, lane_shares
from trainers.elastic.work.digests import Commit
from trainers.elastic.work.plain_work import PlainWork
from trainers.elastic.work.planned_work import PlannedWork
from trainers.elastic.work.planning import Planning
from trainers.lightning_seams import forget_loader
from trainers.offloading.devices import keep_on_host
from trainers.one_device import OneDeviceStrategy

log = logging.getLogger(__name__)


class Commits:
    """The source of a run's commits: a swarm, logs, or one lane."""

    def next(self, work: PlainWork) -> Commit:
        """Return the next commit. The caller applies it before it asks again."""
        raise NotImplementedError

    def applied(self, commit: Commit) -> None:
        """Note that the commit is in the weights."""
        raise NotImplementedError

    def end_run(self) -> None:
        """Note that the whole run has come to its end."""

    def close(self) -> None:
        """End everything. It is safe to call again."""


Sum = Literal["fast", "exact"]
SUMS: tuple[Sum, ...] = get_args(Sum)


CLOSED_TO_NEWCOMERS = (
    "a pass has one step, and no run goes on exactly from the beginning of a pass: so newcomers"
    " can join only before the very first step; give a smaller batch, so that passes are longer"
)


class ElasticFit(OneDeviceStrategy):
    """The base of what trains by commits."""

    def __init__(
        self,
        global_batch: int | None,
        lanes: int,
        sum: Sum,
        budget: str | int | None = None,
        devices: int = 1,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        is_planned = budget is not None or devices != 1
        self._planning = Planning(budget, devices) if is_planned else None
        if sum not in SUMS:
            raise CannotBeElastic(f"sum={sum!r}: choose one of {', '.join(SUMS)}")
        self._sum = sum
        self._lanes = lanes
        self._global_batch = global_batch
        self._shares: LaneShares | None = None
        self._commits: Commits | None = None
        self._work: PlainWork | None = None
        self._commit: Commit | None = None
        self._has_warned = False
        self.latest_added: Added = ()

    def _begin(self, trainer: L.Trainer, shares: LaneShares) -> Commits:
        """Return where this run's commits come from."""
        raise NotImplementedError

    def _take_several(self, devices: Sequence[torch.device]) -> NoReturn:
        raise CannotBeElastic(
            f"Trainer(devices={len(devices)}): give Trainer(devices=1), and devices= to the"
            " strategy, which spreads a peer's lanes over them"
        )

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest part of a step. It exists after the first lane, with a budget."""
        return None if self._planning is None else self._planning.plan

    @property
    def is_global_zero(self) -> bool:
        """Whether this peer writes logs and checkpoints."""
        return self.global_rank == 0

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._module.trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        if dataloader is not self._shares and (
            self._shares is None or self._shares.loader is not dataloader
        ):
            self._shares = lane_shares(dataloader, self._lanes, self._global_batch)
        return self._shares

    def model_to_device(self) -> None:
        if self._planning is None or self.root_device.type == "cpu":
            super().model_to_device()
        else:
            # The first plan moves to a GPU what it keeps there.
            keep_on_host(self._module, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._planning is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        # They are not moved: before there is a plan they belong on the host.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def setup(self, trainer: L.Trainer) -> None:
        if self._planning is not None:
            self._planning.find_target(self)
        if type(self.checkpoint_io) is TorchCheckpointIO:
            # The peer that writes may be killed while it does.
            self.checkpoint_io = AtomicCheckpointIO()
        super().setup(trainer)
        if self._planning is not None:
            self._planning.place(self._module)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_run(trainer, self._module)
        trainer.fit_loop.setup_data()
        forget_loader(trainer)  # The loop asks again, when it knows where to go on.
        if self._shares is None:
            raise CannotBeElastic("there is no train loader, and a swarm has nothing to train on")
        self._commits = self._begin(trainer, self._shares)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if isinstance(batch, LaneShare):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._commits is not None and self._shares is not None
        share, *rest = args
        if share != LaneShare(*self._shares.lanes.position):
            raise CannotBeElastic(
                f"Lightning is at {share}, and the lanes are at {self._shares.lanes.position}: the"
                " state of the train loader was not restored"
            )
        if len(self._shares) == 1 and not self._has_warned:
            self._has_warned = True
            log.warning(CLOSED_TO_NEWCOMERS)
        work = self._work or self._make_work(self._shares)
        step = self._module.trainer.global_step
        work.open(step, rest[0] if rest else share.step, self._shares.micro)
        try:
            self._commit = commit = self._commits.next(work)
        finally:
            work.end()
        work.catcher.log(commit.logs)
        return torch.tensor(commit.logs.mean(commit.logs.loss), device=self.root_device)

    def backward(
        self,
        closure_loss: Tensor,
        optimizer: torch.optim.Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Put the step's mean gradient in place. The backward passes have been made already."""
        commit, work = self._commit, self._work
        assert commit is not None and work is not None
        work.apply_commit(commit)
        for callback in self._module.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            callback.on_after_backward(self._module.trainer, self._module)
        self._module.on_after_backward()
        return closure_loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        with nullcontext() if self._planning is None else self._planning.update:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        commit, self._commit = self._commit, None
        assert commit is not None and self._shares is not None and self._commits is not None
        self._shares.advance()
        self._commits.applied(commit)
        self.latest_added = commit.added
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("validation_step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("test_step"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("predict_step"):
            return super().predict_step(*args, **kwargs)

    def teardown(self) -> None:
        commits, self._commits = self._commits, None
        self._work = None
        try:
            if commits is not None:
                commits.close()
        finally:
            if self._planning is not None:
                self._planning.session.close()
        if self._shares is not None:
            self._shares.close()
            self._shares = None
        self._set_rank(0)
        super().teardown()

    def on_train_end(self) -> None:
        """Report that the run has come to its end, and was not broken off."""
        if self._commits is not None:
            self._commits.end_run()
        if self._planning is not None:
            self._planning.session.interrupt.deliver()

    @property
    def _module(self) -> L.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _make_work(self, shares: LaneShares) -> PlainWork:
        module, trainer = self._module, self._module.trainer
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        to_device = super().batch_to_device

        def training_step(batch: Any, batch_index: int) -> Any:
            batch = to_device(self.precision_plugin.convert_input(batch))
            with self.precision_plugin.train_step_context():
                return module.training_step(*((batch, batch_index) if takes_index else (batch,)))

        def backward(loss: Tensor) -> None:
            loss = self.precision_plugin.pre_backward(loss, module)
            self.precision_plugin.backward(loss, module, trainer.optimizers[0])

        given = module, self.optimizers[0], shares.lanes, training_step, backward
        exact = self._sum == "exact"
        if self._planning is None:
            self._work = PlainWork(*given, exact=exact)
        else:
            self._work = PlannedWork(*given, planning=self._planning, exact=exact)
        return self._work

    def _one_step(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._planning is None else self._planning.step(name)

    def _set_rank(self, rank: int) -> None:
        self.global_rank = rank
        vars(rank_zero_only)["rank"] = rank  # Lightning keeps it at its function.


HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")
PER_LANE = "a swarm's batch is a share of a global step, and samples come lane by lane"


def check_run(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise `CannotBeElastic` with all that is wrong, each with what to do."""
    wrong: list[str] = []
    if not module.automatic_optimization:
        wrong.append(
            "manual optimization steps when it wants, and a swarm applies one total a step: use"
            " automatic optimization"
        )
    if len(module.trainer.optimizers) > 1:
        count = len(module.trainer.optimizers)
        wrong.append(f"there are {count} optimizers, and a swarm has one: configure one")
    for hook in HOOKS:
        if is_overridden(hook, module):
            wrong.append(f"{type(module).__name__}.{hook}: {PER_LANE}; use on_after_batch_transfer")
    for name, part in module.named_modules():
        if type(part).__name__ == "SyncBatchNorm":
            wrong.append(f"{name} is a SyncBatchNorm, which waits for other ranks: use BatchNorm")
    if every := getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
        wrong.append(
            f"reload_dataloaders_every_n_epochs={every}: a swarm deals one loader from the first"
            " step to the last; leave it at 0"
        )
    if trainer.accumulate_grad_batches != 1:
        wrong.append(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: lanes are micro-batches"
            " already; leave it at 1 and choose lanes="
        )
    every = trainer.val_check_interval
    if trainer.enable_validation and isinstance(every, int) and every == 1:
        wrong.append(
            "val_check_interval=1: no run goes on exactly right after a validation, so newcomers"
            " would never be let in; validate after every second batch, or less often"
        )
    plugin: Any = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        wrong.append(
            "precision 16-mixed scales gradients by what a peer has seen (GradScaler), so peers"
            " would differ: use bf16-mixed or 32-true"
        )
    if wrong:
        raise CannotBeElastic("; ".join(wrong))
