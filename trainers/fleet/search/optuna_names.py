"""Optuna's samplers and pruners by their names, for a configuration."""

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.fleet import Fleet
from trainers.fleet.jobs.seat import JobProgram
from trainers.fleet.search.optuna_pruner import OptunaPruner, import_optuna
from trainers.fleet.search.optuna_search import OptunaSearch

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

PLAIN = (bool, int, float, str, type(None))
"""The types of which Optuna takes a value as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class MakeOfChoices:
    """Gives `make` the values that stand behind Optuna's choices."""

    make: Callable[[Mapping[str, Any]], JobProgram]
    values: Mapping[str, Sequence[Any]]

    def __call__(self, params: Mapping[str, Any]) -> JobProgram:
        of = self.values
        return self.make(
            {key: of[key][_choices(key, of[key]).index(choice)] for key, choice in params.items()}
        )


def optuna_pruner_of(
    name: str, metric: str, *, every: int, mode: Literal["min", "max"] = "min"
) -> OptunaPruner:
    """Return the stop rule of a pruner with its usual settings, such as "MedianPruner"."""
    pruners = import_optuna().pruners
    pruner = _class_of(pruners, "Pruner", name)
    try:
        made = pruner()
    except TypeError as error:
        raise FleetError(
            f"{name} has settings that must be given ({error}): make an OptunaPruner in Python"
        ) from error
    return OptunaPruner(made, metric, every=every, mode=mode)


def optuna_search_of(
    fleet: Fleet,
    values: Mapping[str, Sequence[Any]],
    make: Callable[[Mapping[str, Any]], JobProgram],
    *,
    sampler: str,
    trials: int,
    at_once: int,
    seed: int,
    storage: str | None = None,
) -> OptunaSearch:
    """Return a search for the best combination of `values`, which a sampler such as "TPESampler"
    chooses. `make` gets one of the values of each key, and is pickled if the fleet has
    processes."""
    sizes = {key: len(choices) for key, choices in values.items()}
    if not values or 0 in sizes.values():
        raise FleetError(f"a search needs at least one value of each key, not {sizes}")
    if trials > math.prod(sizes.values()):
        raise FleetError(
            f"{trials} trials are more than the {math.prod(sizes.values())} combinations of the"
            " grid: ask for fewer, or give more values"
        )
    distribution = import_optuna().distributions.CategoricalDistribution
    return OptunaSearch(
        fleet,
        sampler_of(sampler, values, seed),
        {key: distribution(_choices(key, choices)) for key, choices in values.items()},
        MakeOfChoices(make, values),
        trials=trials,
        at_once=at_once,
        seed=seed,
        storage=storage,
    )


def sampler_of(name: str, values: Mapping[str, Sequence[Any]], seed: int) -> "BaseSampler":
    samplers = import_optuna().samplers
    sampler = _class_of(samplers, "Sampler", name)
    try:
        if name == "GridSampler":
            return sampler({key: _choices(key, given) for key, given in values.items()}, seed=seed)
        return sampler(seed=seed)
    except (TypeError, ImportError) as error:
        raise FleetError(
            f"{name} cannot be made from a seed alone ({error}): make an OptunaSearch in Python"
        ) from error


def _class_of(module: ModuleType, kind: str, name: str) -> Any:
    known = [each for each in module.__all__ if each.endswith(kind) and not each.startswith("Base")]
    if name in known:
        return getattr(module, name)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    raise FleetError(f"Optuna has no {kind.lower()} {name!r}: {hint}")


def _choices(key: str, values: Sequence[Any]) -> list[Any]:
    """Return the values as they are, if Optuna takes them and can tell them apart. Else they become
    text: it takes no list, and to it True is 1."""
    if all(isinstance(value, PLAIN) for value in values) and len({*values}) == len(values):
        return [*values]
    texts = [json.dumps(value) for value in values]
    if len({*texts}) < len(texts):
        raise FleetError(f"{key} has a value twice: {', '.join(texts)}")
    return texts
