"""`L.Trainer(strategy=ElasticStrategy(lanes=64, join="10.0.0.1:29400", secret_file=...))`.

One batch of Lightning's is this peer's share of a global step. Everything else of a run is as
always, and equal at every peer: `global_step`, schedulers, validation, checkpoints, callbacks.

    training_step   header, lanes, reduce, vote -> the commit (swarm/swarm_commits.py)
    backward        the commit's mean gradient becomes the parameters' .grad
    optimizer_step  Lightning clips and updates; then the step is applied, and the lanes advance

The peer with rank 0 in its generation writes logs and checkpoints. Validation runs at every peer,
whole, so what it decides is decided alike.
"""

import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from trainers.elastic.commits.commit import Commit
from trainers.elastic.deciding.view import Member, View
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.giving.donated_state import DonatedState
from trainers.elastic.giving.donor import Donor
from trainers.elastic.membership.anchor_link import AnchorLink
from trainers.elastic.peer.lane_shares import LaneShare, LaneShares, lane_shares
from trainers.elastic.peer.refusals import check_run
from trainers.elastic.peer.run_digests import run_digests
from trainers.elastic.swarm.swarm_commits import Host, SwarmCommits
from trainers.elastic.wire import Address, parse_addresses, read_secret
from trainers.elastic.working.plain_work import PlainWork
from trainers.lightning_seams import begin_with_checkpoint, checkpoint_now, loaded_checkpoint


class ElasticStrategy(SingleDeviceStrategy):
    """Trains one global batch with whoever is there."""

    strategy_name = "elastic"

    def __init__(
        self,
        global_batch: int | None = None,
        lanes: int = 64,
        join: str = "",
        secret_file: str | Path = "",
        *,
        host: str = "",
        name: str = "",
        insecure_network: bool = False,
        alike: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """`global_batch`: the samples of a step, over all peers; the loader's batch size if not
        given. `lanes`: into so many micro-batches it is divided. `join`: the anchors' addresses,
        HOST:PORT[,HOST:PORT...]. `secret_file`: the same at every peer. `host`: the address at
        which others reach this peer; the one by which it reaches the anchor if not given. `name`:
        of this peer, unique in the swarm. `alike`: more that must be equal at all peers, by name.
        `more` is given to Lightning's strategy."""
        super().__init__(**more)
        self._addresses = parse_addresses(join)
        self._secret = read_secret(secret_file)
        self._lanes = lanes
        self._global_batch = global_batch
        self._host = host
        self._name = name or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._insecure_network = insecure_network
        self._alike = dict(alike or {})
        self._shares: LaneShares | None = None
        self._commits: SwarmCommits | None = None
        self._work: PlainWork | None = None
        self._commit: Commit | None = None
        self._safe = True

    # ---- what Lightning asks ---------------------------------------------------------------------

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
        if self._shares is None or self._shares.loader is not dataloader:
            self._shares = lane_shares(dataloader, self._lanes, self._global_batch)
        return self._shares

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_run(trainer, self._module)
        trainer.fit_loop.setup_data()
        if self._shares is None:
            raise CannotBeElastic("there is no train loader, and a swarm has nothing to train on")
        self._join(trainer, self._shares)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if isinstance(batch, LaneShare):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._commits is not None and self._shares is not None
        share, *rest = args
        work = self._work or self._make_work(self._shares)
        work.open(self._step, rest[0] if rest else share.step)
        try:
            self._commit = commit = self._commits.next(work)
        finally:
            work.end()
        samples = commit.logs.samples
        work.catcher.log(dict(commit.logs.values), samples)
        return torch.tensor(commit.logs.loss / samples, device=self.root_device)

    def backward(
        self,
        closure_loss: Tensor,
        optimizer: torch.optim.Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The backward passes are done. The step's mean gradient is put in place."""
        commit, work = self._commit, self._work
        assert commit is not None and work is not None
        work.apply_commit(commit)
        self._call_hook("on_after_backward")
        return closure_loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        commit, self._commit = self._commit, None
        assert commit is not None and self._shares is not None and self._commits is not None
        self._shares.lanes.advance()
        self._commits.applied(commit)
        return output

    def teardown(self) -> None:
        commits, self._commits = self._commits, None
        self._work = None
        if commits is not None:
            commits.close()
        if self._shares is not None:
            self._shares.close()
            self._shares = None
        self._set_rank(0)
        super().teardown()

    def on_train_end(self) -> None:
        """Tell the anchor that the run has come to its end, and did not break off."""
        if self._commits is not None:
            self._commits.ended()

    # ---- the swarm ------------------------------------------------------------------------------

    @property
    def _module(self) -> L.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _step(self) -> int:
        return self._module.trainer.global_step

    @property
    def view(self) -> View | None:
        """The members of the present generation."""
        return None if self._commits is None else self._commits.view

    @property
    def gaps(self) -> list[tuple[str, float]]:
        """Why generations ended unplanned, and the seconds until the next one had begun."""
        return [] if self._commits is None else self._commits.gaps

    def _join(self, trainer: L.Trainer, shares: LaneShares) -> None:
        settings = {"lanes": shares.lanes.lanes, **self._alike}
        manifest = run_digests(self._module, self.optimizers[0], shares, settings)
        host = self._host or own_address(self._addresses[0])
        donor = Donor(host, self._secret, insecure_network=self._insecure_network)
        link = AnchorLink(
            self._addresses, self._secret, Member(self._name, host, donor.port), manifest
        )
        donated = None
        try:
            link.open(self._resumed_step(trainer))
            role = link.role()
            if role.donor is not None:
                donated = DonatedState(role.donor, self._secret)
                state, link.step = donated.receive()
                begin_with_checkpoint(trainer, state)
        except BaseException:
            donor.close()
            link.close()
            raise
        host_of = Host(self._state, self._may_give, self._on_view)
        self._commits = SwarmCommits(link, donor, host_of, donated)

    def _make_work(self, shares: LaneShares) -> PlainWork:
        module, trainer = self._module, self._module.trainer
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

        def on_device(batch: Any) -> Any:
            return super(ElasticStrategy, self).batch_to_device(
                self.precision_plugin.convert_input(batch)
            )

        def step_of(batch: Any, batch_index: int) -> Any:
            with self.precision_plugin.train_step_context():
                return module.training_step(*((batch, batch_index) if takes_index else (batch,)))

        def backward(loss: Tensor) -> None:
            loss = self.precision_plugin.pre_backward(loss, module)
            self.precision_plugin.backward(loss, module, trainer.optimizers[0])

        self._work = PlainWork(
            module, self.optimizers[0], shares.lanes, shares.micro, on_device, step_of, backward
        )
        return self._work

    def _resumed_step(self, trainer: L.Trainer) -> int:
        """The step of the checkpoint that the user gave to `fit`; 0 if there is none."""
        path = trainer.ckpt_path
        if not path:
            return 0
        return int(super().load_checkpoint(path)["global_step"])

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A newcomer begins with the swarm's state, whatever checkpoint it was given."""
        known = loaded_checkpoint(self._module.trainer)
        if self._commits is not None and known:
            return known
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _state(self) -> dict[str, Any]:
        state = checkpoint_now(self._module.trainer)
        state.pop("hyper_parameters", None)  # They may be anything, and every peer has its own.
        state.pop("datamodule_hyper_parameters", None)
        return state

    def _may_give(self) -> bool:
        return self._safe

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note whether the batch before was one after which a run goes on exactly."""

    def _on_view(self, view: View, rank: int) -> None:
        self._set_rank(rank)

    def _set_rank(self, rank: int) -> None:
        self.global_rank = rank
        vars(rank_zero_only)["rank"] = rank  # Lightning keeps it at its function.

    def _call_hook(self, name: str) -> None:
        trainer = self._module.trainer
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            getattr(callback, name)(trainer, self._module)
        getattr(self._module, name)()


def own_address(anchor: Address) -> str:
    """Return the address of this machine from which the anchor is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((anchor.host, anchor.port))  # Nothing is sent: it only finds the way.
        return str(probe.getsockname()[0])
