"""One training of one case, in the process that is made for it, and what came of it as JSON."""

import json
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.command import quiet_lightning
from benchmarks.surveyed.table import list_cases
from trainers import OffloadStrategy

PLAIN = "plain"
EAGER = "OffloadStrategy trains eagerly, without offloading: "
AS_ISSUED = "a step runs as it is issued, without a plan and a budget: "


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training, in a process of its own."""

    budget: str
    """`plain`: without the strategy. `none`: with it, and no budget. Else a share."""
    planned: bool = False
    """Whether plans ran all steps, all parts of them."""
    tasks: int = 0
    """Of the plan."""
    graphs: int = 0
    """Graphs that ran. More than one: shapes, or values that the step asks for, have changed."""
    compared: int = 0
    """Tensors and numbers of module and optimizer."""
    differing: tuple[str, ...] = ()
    """Those that are not plain Lightning's."""
    error: str = ""
    """The class of the exception that ended it, or `hung`, `crashed`, `missing`."""
    said: str = ""
    """The exception, or why a step was not planned."""
    seconds: float = 0.0
    """CPU."""

    @classmethod
    def read(cls, file: Path) -> "TrainingRun":
        values = json.loads(file.read_text())
        return cls(**values | {"differing": tuple(values["differing"])})


class PlannedSteps(L.Callback):
    """Counts the training steps that ran by plans, all parts of them."""

    def __init__(self) -> None:
        self.count = 0
        self._before = 0

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._before = getattr(trainer.strategy, "planned_steps", 0)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.count += getattr(trainer.strategy, "planned_steps", 0) > self._before


def train_to_file(name: str, budget: str, steps: int, different: int, folder: str) -> None:
    """Write FOLDER/answer.json. FOLDER/plain.pt is the end of the first plain run, which every
    other run is compared with; what libraries print goes to FOLDER/log.txt."""
    log = os.open(Path(folder, "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    quiet_lightning()
    begin = time.process_time()
    try:
        run = _train(name, budget, steps, different, Path(folder, "plain.pt"))
    except ModuleNotFoundError as missing:
        library = list_cases()[name].library
        package = (missing.name or "").partition(".")[0]
        named = library if package in ("", library) else f"{library} {package}"
        run = TrainingRun(budget, error="missing", said=f"pip install {named}")
    except Exception as error:
        traceback.print_exc()
        run = TrainingRun(budget, error=type(error).__name__, said=str(error))
    run = replace(run, seconds=round(time.process_time() - begin, 1))
    Path(folder, "answer.json").write_text(json.dumps(asdict(run)))


def _train(name: str, budget: str, steps: int, different: int, plain_file: Path) -> TrainingRun:
    case = list_cases()[name]
    L.seed_everything(0, verbose=False)
    module, batches = case.module(), case.batches(steps, different)
    start = {key: value.clone() for key, value in module.state_dict().items()}
    strategy: Any = "auto"
    if budget != PLAIN:
        strategy = OffloadStrategy(budget=None if budget == "none" else budget)
    planned_steps = PlannedSteps()
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, callbacks=[planned_steps],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]
    validates = type(module).validation_step is not L.LightningModule.validation_step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader if validates else None)
    end = dict(name_leaves("module", module.state_dict()))
    for number, optimizer in enumerate(trainer.optimizers):
        end |= name_leaves(f"optimizer {number}", optimizer.state_dict())
    if budget == PLAIN and not plain_file.exists():
        _check_trained(start, module.state_dict())
        torch.save(end, plain_file)
        return TrainingRun(budget, compared=len(end))
    plain = torch.load(plain_file, weights_only=False)
    if budget == PLAIN:
        return TrainingRun(budget, compared=len(plain), differing=_differing(plain, end))
    texts = [str(warning.message) for warning in caught]
    reasons = [text for text in texts if text.startswith((EAGER, AS_ISSUED))]
    if budget != "none" and planned_steps.count < steps:
        reasons.append(f"plans ran {planned_steps.count} of {steps} steps")
    if not strategy.plans:
        reasons.append("no part of a step came again, so without a budget there was no plan")
    said = reasons[0].removeprefix(EAGER).removeprefix(AS_ISSUED) if reasons else ""
    graphs = len(strategy.plans)
    tasks = len(strategy.plan.graph.tasks) if graphs else 0
    differing = _differing(plain, end)
    return TrainingRun(budget, not reasons, tasks, graphs, len(plain), differing, said=said)


def name_leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf of nested dicts, lists and tuples with its path; tensors are copied."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from name_leaves(f"{path}.{key}", value)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from name_leaves(f"{path}[{number}]", value)
    else:
        yield path, tree.clone() if isinstance(tree, torch.Tensor) else tree


def _check_trained(start: dict[str, Any], end: dict[str, Any]) -> None:
    """Equal bits say something of a run that trains, and stays finite."""
    changed = [value for key, value in end.items() if not torch.equal(start[key], value)]
    if not changed:
        raise RuntimeError("plain Lightning's run has changed no weight")
    if not all(bool(value.isfinite().all()) for value in changed if value.is_floating_point()):
        raise FloatingPointError("plain Lightning's run ends with weights that are not finite")


def _differing(plain: dict[str, Any], ours: dict[str, Any]) -> tuple[str, ...]:
    """Names of what differs, or is there in one of the two only."""
    names = [*plain, *(name for name in ours if name not in plain)]
    both = plain.keys() & ours.keys()
    return tuple(n for n in names if n not in both or not _is_equal(plain[n], ours[n]))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b
