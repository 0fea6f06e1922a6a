"""The program of `fleet.add`: an unchanged LightningModule with loaders and Trainer arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader

from offload.sizes import parse_size
from trainers.atomic_checkpoint import AtomicCheckpointIO, written
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.jobs.job_checkpoint import FINAL, LAST, JobCheckpoint
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.mid_pass_loader import MidPassLoader, in_mid_pass
from trainers.fleet.jobs.seat import Seat
from trainers.read_checkpoint import CheckpointRefused, going_on_from, read_checkpoint

Module = L.LightningModule | Callable[[], L.LightningModule]
OURS = ("strategy", "accelerator", "devices", "num_nodes", "default_root_dir")
"""The arguments of a Trainer that the fleet gives itself."""
QUIET = MappingProxyType({"enable_progress_bar": False, "enable_model_summary": False})
"""Many jobs on one screen would write over each other."""


@dataclass(frozen=True, slots=True, eq=False)
class LightningJob:
    """Trains one module. Whatever is a function of no arguments is called in the job's own turn."""

    module: Module
    train: Any
    val: Any
    trainer: Mapping[str, Any]
    offload: Mapping[str, Any] | None
    """The options of its `OffloadStrategy`; None trains it with plain Lightning."""
    seed: int | None
    reserve: int | None
    """What a job of plain Lightning takes of its device, as its user says."""

    @classmethod
    def of(
        cls,
        name: str,
        module: Module,
        train: Any,
        val: Any,
        trainer: Mapping[str, Any],
        offload: Mapping[str, Any] | Literal[False] | None,
        seed: int | None,
        reserve: str | int | None,
        device: torch.device,
    ) -> "LightningJob":
        """Return the program of `Fleet.add`. Raise `FleetError` if it cannot be one."""
        given = [key for key in OURS if key in trainer]
        if given:
            raise FleetError(
                f"job {name}: trainer={{{given[0]!r}: {trainer[given[0]]!r}}} cannot be given,"
                " because the fleet chooses it. Options of the strategy go into offload={...}"
            )
        if train is None:
            raise FleetError(f"job {name} has no train loader: give train=")
        if isinstance(train, list | tuple | dict | CombinedLoader):
            raise FleetError(
                f"job {name}: train={type(train).__name__} holds several loaders, which cannot go"
                " on in mid-pass after a move or a kill: give one loader over all data"
            )
        if (offload is False) != (reserve is not None) and (device.type != "cpu" or reserve):
            raise FleetError(
                f"job {name}: a job of plain Lightning (offload=False) needs reserve='8GiB', what"
                " it takes of its GPU, because nobody knows before it runs; no other job has it"
            )
        try:
            nbytes = None if reserve is None else parse_size(reserve)
        except ValueError as error:
            raise FleetError(f"job {name}: reserve: {error}") from None
        options = None if offload is False else dict(offload or {})
        return cls(module, train, val, dict(trainer), options, seed, nbytes)

    @property
    def makes_all(self) -> bool:
        """Whether its module is made in its own turn."""
        return not isinstance(self.module, L.LightningModule)

    def __call__(self, seat: Seat) -> None:
        if self.seed is not None:
            L.seed_everything(self.seed, verbose=False)
        seat.reserve = self.reserve
        module = _made(self.module)
        if not isinstance(module, L.LightningModule):
            raise FleetError(
                f"job {seat.name}: a {type(module).__name__} was given as its module; give a"
                " LightningModule, or a function that returns one"
            )
        trainer = self._trainer(seat)
        checkpoint = JobCheckpoint(seat)
        trainer.callbacks.append(checkpoint)  # pyright: ignore[reportAttributeAccessIssue]
        last = seat.folder / LAST
        resumed = last if last.exists() else None  # whoever gave the folder may have written it
        with going_on_from(resumed, trainer):
            trainer.fit(
                module,
                self._input(seat, checkpoint),
                _made(self.val),
                ckpt_path=resumed,
                weights_only=True,
            )
        final = seat.folder / FINAL
        if not written(trainer, final, weights_only=True):
            raise FleetError(
                f"job {seat.name} has trained to its end, and {final} could not be written: see the"
                " error above, free some space, and begin it again in another folder"
            )

    def _input(self, seat: Seat, checkpoint: JobCheckpoint) -> MidPassLoader:
        loader = _made(self.train)
        if seat.input is not None:
            loader = seat.input.shared(loader, loader if loader is self.train else None)
        found = in_mid_pass(loader, seat.device, checkpoint.between_batches)
        if seat.input is not None:
            seat.input.leave_here = found.ask_between
        return found

    def _trainer(self, seat: Seat) -> L.Trainer:
        given = {**QUIET, **self.trainer}
        callbacks = given.pop("callbacks", None) or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        plugins = given.pop("plugins", None) or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        strategy = {} if self.offload is None else {"strategy": seat.strategy(**self.offload)}
        return L.Trainer(
            **given,
            **strategy,
            **seat.on_device,
            callbacks=[*callbacks, *seat.callbacks],
            plugins=[*plugins, AtomicCheckpointIO()],
            default_root_dir=seat.folder,
        )


def give_final_weights(program: JobProgram, folder: Path) -> None:
    """Give the module of a finished job its last weights, if it was trained by an earlier process
    or in another one."""
    module = program.module if isinstance(program, LightningJob) else None
    final = folder / FINAL
    if isinstance(module, L.LightningModule) and final.exists():
        weights = read_checkpoint(final, "state_dict", dict)
        try:
            module.load_state_dict(weights)
        except Exception as error:  # whatever torch stumbles over in a mutated one
            why = str(error).partition("\n")[0]
            raise CheckpointRefused(
                f"{final} does not fit ({why}): add the job with the module that wrote it, or give"
                " the fleet another folder"
            ) from error


def _made(given: Any) -> Any:
    """Return what was given, or what it makes. A module and a loader are no makers."""
    is_maker = callable(given) and not isinstance(given, torch.nn.Module)
    return given() if is_maker and not hasattr(given, "__iter__") else given
