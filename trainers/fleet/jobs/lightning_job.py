"""The program of `fleet.add`: an unchanged LightningModule with loaders and Trainer arguments."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from offload.sizes import parse_size
from trainers.atomic_checkpoint import AtomicCheckpointIO, written
from trainers.fleet.deciding.events import FleetError
from trainers.fleet.jobs.job_checkpoint import JobCheckpoint
from trainers.fleet.jobs.job_turns import FINAL, LAST
from trainers.fleet.jobs.seat import JobProgram, Seat
from trainers.random_state import RandomState
from trainers.read_checkpoint import CheckpointRefused, going_on_from, read_checkpoint


class MidPassLoader:
    """Wraps one loader. Everything but its iterator and its state is the loader's own."""

    def __init__(self, loader: Any, device: torch.device, between: Callable[[int], None]) -> None:
        """`between` is called with the batches taken so far, before each batch but the first."""
        self._loader = loader
        self._device = device
        self._between = between
        self._own_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._began: RandomState | None = None
        self._taken = 0
        self._resume_state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        state, self._resume_state = self._resume_state, None
        if state is None:
            self._began, self._taken = RandomState.capture(self._device), 0
            batches = iter(self._loader)
        else:
            batches = self._replayed(state)
        return self._counted(batches)

    def _replayed(self, state: dict[str, Any]) -> Iterator[Any]:
        settings = RandomState.capture(self._device).settings
        self._began = RandomState.from_plain(state["began"])
        self._began.restore(self._device)
        batches = iter(self._loader)
        if not self._own_state:
            for _ in range(state["taken"]):
                next(batches)
        self._taken = state["taken"]
        RandomState.from_plain(state["dice"]).restore(self._device)
        settings.apply()
        return batches

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._taken:
                self._between(self._taken)
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._taken += 1
            yield batch

    def call_between(self) -> None:
        """Call `between` while the loader waits for its next batch, but not before the first."""
        if self._taken:
            self._between(self._taken)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these before there is a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        assert self._began is not None
        return {
            "began": self._began.to_plain(),
            "taken": self._taken,
            "dice": RandomState.capture(self._device).to_plain(),
            "loader": self._loader.state_dict() if self._own_state else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume_state = state
        if self._own_state:
            self._loader.load_state_dict(state["loader"])


class MidPassDataLoader(MidPassLoader, DataLoader[Any]):
    """Lightning does not try the iterator of a DataLoader beforehand, which would draw a random
    number. The methods of DataLoader read the attributes of the wrapped loader."""


Module = L.LightningModule | Callable[[], L.LightningModule]
FLEET_ARGUMENTS = ("strategy", "accelerator", "devices", "num_nodes", "default_root_dir")
"""The arguments of a Trainer that only the fleet gives."""
QUIET = MappingProxyType({"enable_progress_bar": False, "enable_model_summary": False})
"""Many jobs on one screen would write over each other."""


@dataclass(frozen=True, slots=True, eq=False)
class LightningJob:
    """Trains one module. Functions without arguments are called in the job's own turn."""

    module: Module
    train: Any
    val: Any
    trainer: Mapping[str, Any]
    offload: Mapping[str, Any] | Literal[False] | None
    """The options of its `OffloadStrategy`; False trains it with plain Lightning."""
    seed: int | None
    reserve: str | int | None
    """The bytes that a job of plain Lightning takes of its device, as its user says."""

    def check(self, name: str, device: torch.device) -> None:
        """Raise `FleetError` if an argument of `Fleet.add` is wrong."""
        given = [key for key in FLEET_ARGUMENTS if key in self.trainer]
        if given:
            raise FleetError(
                f"job {name}: trainer={{{given[0]!r}: {self.trainer[given[0]]!r}}} cannot be given,"
                " because the fleet chooses it. Options of the strategy go into offload={...}"
            )
        if self.train is None:
            raise FleetError(f"job {name} has no train loader: give train=")
        if isinstance(self.train, list | tuple | dict | CombinedLoader):
            raise FleetError(
                f"job {name}: train={type(self.train).__name__} holds several loaders, which cannot"
                " resume in mid-pass after a move or a kill: give one loader over all data"
            )
        needs_reserve = self.offload is False
        has_reserve = self.reserve is not None
        if needs_reserve != has_reserve and (device.type != "cpu" or self.reserve):
            raise FleetError(
                f"job {name}: a job of plain Lightning (offload=False) needs reserve='8GiB', what"
                " it takes of its GPU, because nobody knows before it runs; no other job has it"
            )
        try:
            self.reserved_bytes()
        except ValueError as error:
            raise FleetError(f"job {name}: reserve: {error}") from None

    def reserved_bytes(self) -> int | None:
        return None if self.reserve is None else parse_size(self.reserve)

    @property
    def makes_module(self) -> bool:
        """Whether the module is made in the job's own turn."""
        return not isinstance(self.module, L.LightningModule)

    def __call__(self, seat: Seat) -> None:
        if self.seed is not None:
            L.seed_everything(self.seed, verbose=False)
        seat.reserve = self.reserved_bytes()
        module = made_of(self.module)
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
            made = made_of(self.train)
            shared = seat.share_loader(made, made if made is self.train else None)
            kind = MidPassDataLoader if isinstance(shared, DataLoader) else MidPassLoader
            train = kind(shared, seat.device, checkpoint.between_batches)
            seat.leave_between_batches = train.call_between
            val = made_of(self.val)
            trainer.fit(module, train, val, ckpt_path=resumed, weights_only=True)
        final = seat.folder / FINAL
        if not written(trainer, final, weights_only=True):
            raise FleetError(
                f"job {seat.name} has trained to its end, and {final} could not be written: see the"
                " error above, free some space, and begin it again in another folder"
            )

    def _trainer(self, seat: Seat) -> L.Trainer:
        given = {**QUIET, **self.trainer}
        callbacks, plugins = given.pop("callbacks", None), given.pop("plugins", None)
        is_plain = self.offload is False
        strategy = {} if is_plain else {"strategy": seat.strategy(**(self.offload or {}))}
        return L.Trainer(
            **given,
            **strategy,
            **seat.on_device,
            callbacks=[*as_list(callbacks), *seat.callbacks],
            plugins=[*as_list(plugins), AtomicCheckpointIO()],
            default_root_dir=seat.folder,
        )


def give_final_weights(program: JobProgram, folder: Path) -> None:
    """Load the last weights into a finished job's module: another process may have trained it."""
    module = program.module if isinstance(program, LightningJob) else None
    final = folder / FINAL
    if isinstance(module, L.LightningModule) and final.exists():
        weights = read_checkpoint(final, "state_dict", dict)
        try:
            module.load_state_dict(weights)
        except Exception as error:  # any error of torch about a damaged file
            why = str(error).partition("\n")[0]
            raise CheckpointRefused(
                f"{final} does not fit ({why}): add the job with the module that wrote it, or give"
                " the fleet another folder"
            ) from error


def check_arguments(made: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `FleetError` if a user's `make` has returned something else than these arguments."""
    if made.keys() - {*known} or not {"module", "train"} <= made.keys():
        raise FleetError(
            f"`make` returned a dict with {', '.join(map(str, made)) or 'nothing'}: module and"
            f" train are needed, and {', '.join(known)} are known"
        )


def as_list(given: Any) -> Iterable[Any]:
    return given if isinstance(given, list | tuple) else () if given is None else (given,)


def made_of(given: Any) -> Any:
    """Return what was given, or what it returns if it is a function that makes it."""
    is_maker = callable(given) and not isinstance(given, torch.nn.Module)
    return given() if is_maker and not hasattr(given, "__iter__") else given
