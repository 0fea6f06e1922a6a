"""Checks what a loader serves of a pipeline, against the pipeline itself.

reuse 2, random      |--k batches--| state --------- rest ---------|    counts, draws, structure
another loader                     | load  --------- the same? ----|    resume
reuse 1, not random  every batch == collate of what the data set gives  content
"""

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from surveyed_pipelines.pipeline_case import Form, Pipeline
from surveyed_pipelines.pipeline_rows import Attempt

REUSE = 2
STOP = 3
"""The state is saved after so many batches."""
ROUNDING = 2e-6
SEED = 20


@dataclass(frozen=True, slots=True)
class Reference:
    """What the pipeline gives by itself."""

    batch: Any
    """The DataLoader's first one, with random steps."""
    samples: Mapping[int, Any]
    """Without random steps, by their numbers."""


def reference(case: Pipeline, folder: Path) -> Reference:
    """Made before any loader: torch's workers are forks, which a loader's threads would disturb."""
    torch.manual_seed(SEED)
    dataloader = case.dataloader(folder, True)
    dataloader.num_workers = int(dataloader.worker_init_fn is not None)  # it starts sooner
    return Reference(next(iter(dataloader)), _known_samples(case, folder))


def attempt(case: Pipeline, form: Form, folder: Path, plain: Reference) -> Attempt:
    """The facts of a form that is not refused. Whatever the loader raises is raised."""
    with summaries() as said:
        batches, state = _served(form, folder)
    content, rounding = _content(case, form, folder, plain.samples)
    return Attempt(
        form.change,
        summary=said[0] if said else "",
        structure=_structure(case, batches[0], plain.batch),
        served=_counts(case, batches, plain.samples),
        draws=_draws(case, form, batches),
        content=content,
        rounding=rounding,
        resumed=_resumed(form, folder, batches, state),
    )


@contextmanager
def summaries() -> Iterator[list[str]]:
    """The lines in which a loader says what is cached and what is redone."""
    found: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    log, handler = logging.getLogger("loaders.summary"), Keeping()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def _served(form: Form, folder: Path) -> tuple[list[Any], Any]:
    """All batches of a pass, and the state after some of them."""
    torch.manual_seed(SEED)
    with form.loader(folder, True, REUSE) as loader:
        iterator = iter(loader)
        batches = list(itertools.islice(iterator, STOP))
        state = loader.state_dict()
        batches += iterator
    return batches, state


def _known_samples(case: Pipeline, folder: Path) -> dict[int, Any]:
    collate = _collate(case, folder)
    found = {}
    for sample in _one_by_one(case, folder):
        if sample is not None:
            (number,) = case.ids(collate([sample]))
            found[number] = sample
    assert len(found) == case.count, f"{case.name} has samples {sorted(found)}"
    return found


def _one_by_one(case: Pipeline, folder: Path) -> Iterator[Any]:
    if case.samples is not None:
        yield from case.samples(folder)
        return
    given = case.dataloader(folder, False)
    yield from DataLoader(
        given.dataset, 1, collate_fn=_only, worker_init_fn=given.worker_init_fn,
        num_workers=int(given.worker_init_fn is not None),
    )  # fmt: skip


def _only(samples: Sequence[Any]) -> Any:
    return samples[0]


def _collate(case: Pipeline, folder: Path) -> Any:
    return case.collate or case.dataloader(folder, False).collate_fn


def _counts(case: Pipeline, batches: Sequence[Any], known: Mapping[int, Any]) -> str:
    served = Counter(number for batch in batches for number in case.ids(batch))
    if case.with_replacement:
        odd = sorted(n for n, times in served.items() if times % REUSE)
        total = served.total()
        if odd or total != REUSE * case.count:
            return f"{total} serves of {REUSE * case.count}, an odd number of {odd[:5]}"
        return ""
    others = {n: served[n] for n in {*known, *served} if served[n] != REUSE}
    return f"serves by sample: {dict(sorted(others.items())[:5])}" if others else ""


def _draws(case: Pipeline, form: Form, batches: Sequence[Any]) -> str:
    """Whether serves of a sample differ where the pipeline is random, and are equal where not."""
    if case.content is None:
        return ""
    serves: dict[int, list[Any]] = defaultdict(list)
    for batch in batches:
        for number, shown in zip(case.ids(batch), case.content(batch), strict=True):
            serves[number].append(shown)
    pairs = [shown[:2] for shown in serves.values() if len(shown) > 1]
    differing = sum(bool(difference(*pair)[0]) for pair in pairs)
    redrawn = case.random and form.redrawn
    if redrawn and 2 * differing < len(pairs):
        return f"only {differing} of {len(pairs)} samples differ between their serves"
    if not redrawn and differing and not case.varying:
        return f"{differing} of {len(pairs)} samples differ between their serves"
    return ""


def _structure(case: Pipeline, batch: Any, plain: Any) -> str:
    ours, theirs = (shape_of(one, case.varying) for one in (batch, plain))
    return "" if ours == theirs else f"{ours} instead of {theirs}"


def _content(
    case: Pipeline, form: Form, folder: Path, known: Mapping[int, Any]
) -> tuple[str, float]:
    collate, largest = _collate(case, folder), 0.0
    torch.manual_seed(SEED)
    with form.loader(folder, False, 1) as loader:
        for number, batch in enumerate(loader):
            ids = case.ids(batch)
            said, rounding = difference(batch, collate([known[one] for one in ids]))
            if said and rounding > ROUNDING:
                return f"batch {number}: {said}", rounding
            largest = max(largest, rounding)
    return "", largest


def _resumed(form: Form, folder: Path, batches: Sequence[Any], state: Any) -> str:
    torch.manual_seed(SEED)
    with form.loader(folder, True, REUSE) as loader:
        loader.load_state_dict(state)
        tail = list(loader)
    if len(tail) != len(batches) - STOP:
        return f"{len(tail)} batches instead of {len(batches) - STOP}"
    for number, (one, other) in enumerate(zip(tail, batches[STOP:], strict=True)):
        if said := difference(one, other)[0]:
            return f"batch {STOP + number}: {said}"
    return ""


# ---- comparing nests -----------------------------------------------------------------------------


def difference(one: Any, other: Any, where: str = "batch") -> tuple[str, float]:
    """The first difference of two batches, and how large it is (infinite, if not of numbers)."""
    if type(one) is not type(other):
        return f"{where} is a {type(one).__name__}, not a {type(other).__name__}", np.inf
    if isinstance(one, torch.Tensor | np.ndarray):
        return _of_numbers(torch.as_tensor(one), torch.as_tensor(other), where)
    if isinstance(one, Mapping):
        if [*one] != [*other]:
            return f"{where} has keys {[*one]}, not {[*other]}", np.inf
        parts = [(one[key], other[key], f"{where}[{key!r}]") for key in one]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where} has length {len(one)}, not {len(other)}", np.inf
        parts = [(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return ("", 0.0) if one == other else (f"{where} is {one!r}, not {other!r}", np.inf)
    found = [each for part in parts if (each := difference(*part))[0]]
    return max(found, key=lambda each: each[1], default=("", 0.0))


def _of_numbers(one: torch.Tensor, other: torch.Tensor, where: str) -> tuple[str, float]:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        shapes = f"{one.dtype} {[*one.shape]}, not {other.dtype} {[*other.shape]}"
        return f"{where} is {shapes}", np.inf
    if torch.equal(one, other):
        return "", 0.0
    apart = (one.double() - other.double()).abs().max().item()
    return f"{where} differs by {apart:.3g}", apart


def shape_of(nest: Any, varying: bool) -> Any:
    """What a batch is made of: types, keys, dtypes, shapes. If they `vary`, of shapes the lengths,
    and of lists which kinds of things are in them, besides None."""
    kind = type(nest).__name__
    if isinstance(nest, torch.Tensor | np.ndarray):
        return kind, str(nest.dtype), nest.ndim if varying else tuple(nest.shape)
    if isinstance(nest, Mapping):
        return kind, {key: shape_of(value, varying) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        shapes = [shape_of(value, varying) for value in nest]
        if varying and isinstance(nest, list):
            shapes = sorted({*map(str, shapes)} - {"NoneType"})
        return kind, shapes
    return kind
