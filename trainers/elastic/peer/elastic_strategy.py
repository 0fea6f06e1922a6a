"""`L.Trainer(strategy=ElasticStrategy(lanes=64, join="10.0.0.1:29400", secret_file=...))`.

    setup       connect to the anchor -> begin with its own state, or with that of a member
    each step   a commit of the swarm (peer/swarm_commits.py, elastic_fit.py)
    teardown    the peer leaves; the others train on

The peer with rank 0 in its generation writes logs and checkpoints. Every peer runs the whole
validation, so all peers decide alike what follows from it.
"""

import hashlib
import logging
import platform
import socket
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainers.elastic.deciding.header import Header
from trainers.elastic.deciding.view import Member, View, check_name
from trainers.elastic.errors import CannotBeElastic, Expelled
from trainers.elastic.peer.anchor_link import AnchorLink, Instruction
from trainers.elastic.peer.donated_state import DonatedState
from trainers.elastic.peer.donor import Donor
from trainers.elastic.peer.elastic_fit import Commits, ElasticFit, Sum
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.peer.step_log import UNKNOWN, Era, StepLog, newest_era
from trainers.elastic.peer.swarm_commits import SwarmCommits, TrainerSide
from trainers.elastic.wire.address import Address, parse_addresses
from trainers.elastic.wire.secret import read_secret
from trainers.elastic.wire.wire_errors import WireError
from trainers.lightning_seams import begin_with_checkpoint, checkpoint_now

log = logging.getLogger(__name__)

LOGS = "elastic"
"""The folder, in the trainer's, in which every peer keeps its log."""
ERA = "elastic_era"
"""The key of a checkpoint for the life of the run in which it was written (step_log.py)."""
NO_WRITER = 1
"""The rank of a newcomer that is no member yet: it writes no logs and checkpoints."""

PATIENCE = 3
"""How many heartbeats a newcomer waits for another donor when its own is gone."""


class ElasticStrategy(ElasticFit):
    """Trains one global batch with all peers that are there."""

    strategy_name = "elastic"

    def __init__(
        self,
        global_batch: int | None = None,
        lanes: int = 64,
        *,
        join: str,
        secret_file: str | Path,
        sum: Sum = "fast",
        checkpoint: str | Path | None = None,
        host: str = "",
        name: str = "",
        insecure_network: bool = False,
        loose_key: bool = False,
        alike: Mapping[str, str] | None = None,
        budget: str | int | None = None,
        devices: int = 1,
        **more: Any,
    ) -> None:
        """`global_batch`: the samples of a step, over all peers; the loader's batch size if not
        given. `lanes`: into so many micro-batches it is divided. `join`: the anchors' addresses,
        HOST:PORT[,HOST:PORT...]. `secret_file`: the same at every peer. `sum`: with `exact` the
        weights do not depend on who computed what: they are those of one process alone.
        `checkpoint`: from which this peer begins where nobody has a newer state. `host`: the
        address at which others reach this peer; the one by which it reaches the anchor if not
        given. `name`: of this peer, unique in the swarm. `alike`: more that must be equal at all
        peers, by name. `budget`: lanes and updates run as plans within so many bytes of the device,
        as of `OffloadStrategy`; peers with and without one train together. `devices`: a peer's
        lanes are spread over so many, from the trainer's one on. `loose_key`: others may use the
        secret file here. `more` is given to Lightning's strategy."""
        super().__init__(global_batch, lanes, sum, budget, devices, **more)
        self._addresses = parse_addresses(join)
        self._secret = read_secret(secret_file, loose=loose_key)
        self._checkpoint = checkpoint
        self._host = host
        self._name = name or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        try:
            check_name(self._name)
        except ValueError as error:
            raise CannotBeElastic(f"name={name!r}: {error}") from error
        self._insecure_network = insecure_network
        self._alike = dict(alike or {})
        self.gaps: list[tuple[str, float]] = []
        self._era: Era | None = None
        self.log_path: Path | None = None

    @property
    def view(self) -> View | None:
        """The members of the present generation."""
        form = self._commits.form if isinstance(self._commits, SwarmCommits) else None
        return None if form is None else form.view

    @property
    def headers(self) -> tuple[Header, ...]:
        """The members' headers of the latest step, by rank."""
        return self._commits.headers if isinstance(self._commits, SwarmCommits) else ()

    @property
    def seconds_per_sample(self) -> float | None:
        """How long this peer computes at a sample, as it has measured; None before it has."""
        rate = self._commits.rate if isinstance(self._commits, SwarmCommits) else 0.0
        if not rate or self._shares is None:
            return None
        return 1 / (rate * self._shares.micro)

    def _begin(self, trainer: L.Trainer, shares: LaneShares) -> Commits:
        """Join the swarm. A newcomer gets its state, with which Lightning then begins."""
        settings = {"lanes": shares.lanes.lanes, "sum": self._sum}
        manifest = run_digests(self._module, self.optimizers[0], shares, settings, self._alike)
        host = self._host or own_address(self._addresses[0])
        donor = Donor(host, self._secret, insecure_network=self._insecure_network)
        link = AnchorLink(
            self._addresses, self._secret, Member(self._name, host, donor.port), manifest
        )
        donated = state = None
        try:
            checkpoint = None
            if self._checkpoint is not None:
                checkpoint = super().load_checkpoint(self._checkpoint, weights_only=True)
            has_step = 0 if checkpoint is None else checkpoint["global_step"]
            link.open(has_step)
            role = link.orders.role()
            if role.donor is None and checkpoint is not None:
                link.step = has_step
                begin_with_checkpoint(trainer, checkpoint)
            elif role.donor is not None:
                self._set_rank(NO_WRITER)
                donated, state, link.step = self._take_state(link, role)
                begin_with_checkpoint(trainer, state)
        except BaseException:
            donor.close()
            link.close()
            raise
        folder = Path(trainer.default_root_dir) / LOGS
        self.log_path = folder / f"{self._name}.jsonl"
        if state is None:
            self._era = _new_era(checkpoint, folder)
        else:
            self._era = Era.of_plain(state[ERA])
        log = StepLog(self.log_path, {**settings, "micro": shares.micro})
        source = "nothing" if checkpoint is None else "checkpoint"
        log.begins(link.step, source if donated is None else "member", self._era)
        trainer_side = TrainerSide(self._state, self._may_give, self._set_rank, log)
        commits = SwarmCommits(link, donor, trainer_side, donated)
        self.gaps = commits.gaps
        return commits

    def _take_state(
        self, link: AnchorLink, role: Instruction
    ) -> tuple[DonatedState, dict[str, Any], int]:
        """Return who gives the state, the state and its step, from another donor if one dies."""
        while True:
            assert role.donor is not None
            donated = None
            try:
                donated = DonatedState(role.donor, self._secret)
                return donated, *donated.receive(partial(link.orders.names_another, role.donor))
            except WireError as error:
                if donated is not None:
                    donated.close()
                log.warning("%s did not give its whole state: %s", role.donor.name, error)
            role = link.orders.role(role.number, PATIENCE * link.orders.heartbeat)
            if role.donor is None:
                raise Expelled("whoever had the state is gone: start this peer again")

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """A checkpoint says in which era it was written."""
        if self._era is not None:
            checkpoint = {**checkpoint, ERA: self._era.plain()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning calls this for `fit(ckpt_path=...)`, after the swarm has given the state."""
        raise CannotBeElastic(
            f"fit(ckpt_path={str(checkpoint_path)!r}): a swarm decides whose state is the newest;"
            " give it to ElasticStrategy(checkpoint=...)"
        )

    def _state(self) -> dict[str, Any]:
        assert self._era is not None
        state = {**checkpoint_now(self._module.trainer), ERA: self._era.plain()}
        # It is given away in the middle of a batch. The newcomer begins this batch itself, and must
        # not count it twice: what it counts says when it validates.
        total = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        total["ready"] = total["started"] = total["processed"] = total["completed"]
        state.pop("hyper_parameters", None)  # They may be anything, and every peer has its own.
        state.pop("datamodule_hyper_parameters", None)
        return state

    def _may_give(self) -> bool:
        """Whether Lightning goes on exactly with a checkpoint that is made now: not right after a
        validation, nor at the first batch of a pass that is not the first."""
        loop = self._module.trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.completed
        if not done:
            return loop.epoch_progress.current.completed == 0
        trainer = self._module.trainer
        every = trainer.val_check_batch
        if not trainer.enable_validation or every is None:
            return True
        if trainer.check_val_every_n_epoch is None:  # Then batches are counted over all passes.
            done = loop.epoch_loop.batch_progress.total.completed
        return done % every != 0


def _new_era(checkpoint: Mapping[str, Any] | None, folder: Path) -> Era:
    """Return the era that this peer begins. `folder`: where its logs are."""
    number = newest_era(sorted(folder.glob("*.jsonl")))
    if checkpoint is None:
        return Era(uuid.uuid4().hex[:12], number + 1)
    before = Era.of_plain(checkpoint[ERA]) if ERA in checkpoint else Era(UNKNOWN, 0)
    number = max(number, before.number) + 1
    return Era(uuid.uuid4().hex[:12], number, before.id, checkpoint["global_step"])


def own_address(anchor: Address) -> str:
    """Return the address of this machine from which the anchor is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((anchor.host, anchor.port))  # Nothing is sent: it only finds the way.
        return str(probe.getsockname()[0])


def run_digests(
    module: L.LightningModule,
    optimizer: torch.optim.Optimizer,
    shares: LaneShares,
    settings: Mapping[str, Any],
    alike: Mapping[str, str],
) -> dict[str, str]:
    """Return the digests of this peer's run. `alike`: what the user adds."""
    loader = shares.lanes.loader
    forms = [(name, str(t.dtype), tuple(t.shape)) for name, t in module.state_dict().items()]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    identity = loader.identity.state(in_a_pass=False)
    return {
        **{f"strategy.{key}": str(value) for key, value in settings.items()},
        "seed": str(loader.seed),
        "batch of a lane": str(shares.micro),
        "buffer_batches": str(loader.buffer_batches),
        "model": _digest(type(module).__name__, forms),
        "optimizer": _digest(type(optimizer).__name__, groups),
        "samples": str(len(loader.dataset)),
        "data": _digest(identity),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        **alike,
    }


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
