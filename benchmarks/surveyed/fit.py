"""One training of one case, in the process that is made for it, and what came of it as JSON."""

import json
import logging
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from offloading.nests import named_leaves
from torch.utils.data import DataLoader

from surveyed.outcome import Run
from surveyed.registry import cases

PLAIN = "plain"
OURS = "offload", "trainers"
EAGER = "OffloadStrategy trains eagerly, without offloading: "
AS_ISSUED = "a step runs as it is issued, without a plan and a budget: "


class PlannedSteps(L.Callback):
    """Counts the training steps that ran by plans, all parts of them."""

    def __init__(self) -> None:
        self.count = 0
        self._before = 0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._before = _planned(args[0])

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += _planned(args[0]) > self._before


def _planned(trainer: L.Trainer) -> int:
    return getattr(trainer.strategy, "planned_steps", 0)  # older code does not count them


def train(
    name: str, budget: str, steps: int, different: int, kept: str, answer: str, log: str
) -> None:
    """Write to `answer` what came of the run. `budget`: `plain`, `none`, or what OffloadStrategy is
    given. `kept`: the end of the first plain run, which every other run is compared with."""
    _say_to(log)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    begun = time.process_time()
    try:
        found = _trained(name, budget, steps, different, Path(kept))
    except ModuleNotFoundError as missing:
        found = Run(budget, error="missing", said=f"pip install {_package(name, missing)}")
    except Exception as error:
        traceback.print_exc()
        found = _failed(budget, error)
    seconds = round(time.process_time() - begun, 1)
    Path(answer).write_text(json.dumps(asdict(found) | {"seconds": seconds}))


def _trained(name: str, budget: str, steps: int, different: int, kept: Path) -> Run:
    case = cases()[name]
    L.seed_everything(0, verbose=False)
    module, batches = case.module(), case.batches(steps, different)
    start = {key: value.clone() for key, value in module.state_dict().items()}
    strategy: Any = "auto"
    if budget != PLAIN:
        from trainers import OffloadStrategy

        strategy = OffloadStrategy(budget=None if budget == "none" else budget)
    by_plan = PlannedSteps()
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, callbacks=[by_plan],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader if _validates(module) else None)
    end = dict(named_leaves("module", module.state_dict()))
    for number, optimizer in enumerate(trainer.optimizers):
        end |= named_leaves(f"optimizer {number}", optimizer.state_dict())
    if budget == PLAIN and not kept.exists():
        _check_trained(start, module.state_dict())
        torch.save(end, kept)
        return Run(budget, compared=len(end))
    plain = torch.load(kept, weights_only=False)
    if budget == PLAIN:
        return Run(budget, compared=len(plain), differing=_different(plain, end))
    told = [str(one.message) for one in warned]
    whys = [text for text in told if text.startswith((EAGER, AS_ISSUED))]
    if budget != "none" and hasattr(strategy, "planned_steps") and by_plan.count < steps:
        whys.append(f"plans ran {by_plan.count} of {steps} steps")
    if not strategy.plans:
        whys.append("no part of a step came again, so without a budget there was no plan")
    said = _without_roots(whys[0].removeprefix(EAGER).removeprefix(AS_ISSUED)) if whys else ""
    graphs = len(strategy.plans)
    tasks = len(strategy.plan.graph.tasks) if graphs else 0
    return Run(budget, not whys, tasks, graphs, len(plain), _different(plain, end), said=said)


def _validates(module: L.LightningModule) -> bool:
    return type(module).validation_step is not L.LightningModule.validation_step


def _check_trained(start: dict[str, Any], end: dict[str, Any]) -> None:
    """Equal bits say something of a run that trains, and stays finite."""
    changed = [value for key, value in end.items() if not torch.equal(start[key], value)]
    if not changed:
        raise RuntimeError("plain Lightning's run has changed no weight")
    if not all(bool(value.isfinite().all()) for value in changed if value.is_floating_point()):
        raise FloatingPointError("plain Lightning's run ends with weights that are not finite")


def _different(plain: dict[str, Any], ours: dict[str, Any]) -> tuple[str, ...]:
    """Names of what is another, or is there in one of the two only."""
    either = [*plain, *(name for name in ours if name not in plain)]
    return tuple(
        name
        for name in either
        if name not in plain or name not in ours or not _same(plain[name], ours[name])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(one, other)
    return type(one) is type(other) and one == other


# ---- what failed -----------------------------------------------------------------------------


def _failed(budget: str, error: BaseException) -> Run:
    chain = [error]
    while (behind := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(behind)
    refusals = [one for one in chain if type(one).__module__.partition(".")[0] in OURS]
    ours = [spot for one in refusals[-1:] or chain for spot in _frames(one, ours=True)]
    theirs = [spot for one in chain for spot in _frames(one, ours=False)]
    text = _without_roots(f"{type(error).__name__}: {error}" if not refusals else str(error))
    return Run(
        budget, error=type(error).__name__, said=text, raised_at=ours[-1] if ours else "",
        asked_at=theirs[-1] if theirs else "",
    )  # fmt: skip


def _frames(error: BaseException, ours: bool) -> list[str]:
    """`file:line` of the frames of our packages; or of modules and libraries besides torch and
    Lightning."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        package, file = _place(frame.filename)
        foreign = "", "torch", "lightning", *OURS, *sys.stdlib_module_names
        wanted = package in OURS if ours else package.removesuffix(".py") not in foreign
        if wanted and not file.startswith("surveyed/fit.py"):
            found.append(f"{file}:{frame.lineno}")
    return found


def _roots() -> list[str]:
    """Where packages lie, inner folders first."""
    roots = {os.path.abspath(root) for root in sys.path} - {os.sep}
    return sorted(roots, key=len, reverse=True)


def _without_roots(text: str) -> str:
    for root in _roots():
        text = text.replace(root + os.sep, "")
    return text


def _place(filename: str) -> tuple[str, str]:
    """The package, and the path from there on."""
    for root in _roots():
        if filename.startswith(root + os.sep):
            file = filename.removeprefix(root + os.sep)
            return file.partition(os.sep)[0], file
    return "", filename


def _package(name: str, missing: ModuleNotFoundError) -> str:
    home = cases()[name].library
    lacks = (missing.name or "").partition(".")[0]
    return home if lacks in ("", home) else f"{home} {lacks}"


def _say_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
