"""Says what a run would need of cards that are not here: `perfect-train --check --device NAMES`.

Neither weights nor files of weights are read: the module is made on `meta`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from loaders import ReuseLoader
from offload import TaskGraph
from offload.estimating.estimate import Asked, Estimate, LoaderSeconds
from offload.estimating.on_cards import CardSet, check_price, estimate_cards, read_cards
from perfect.assembly.berth import berth_alone, blamed
from perfect.assembly.data import build_data
from perfect.assembly.phase_plan import build_phase_switch
from perfect.assembly.run import build_module, build_trainer
from perfect.config.schema import RunConfig
from perfect.errors import BuildError
from perfect.runs.record import RunLog
from trainers.offloading.check_cards import describe_step, list_remarks, time_loader
from trainers.offloading.shadow_fit import ShadowStrategy, record_fit

MANY = 1000
"""Steps that a price is of, if nothing else is said."""


@dataclass(frozen=True, slots=True)
class CardOptions:
    """What the command line asks about cards."""

    devices: Sequence[str]
    steps: int = MANY
    hours: float | None = None
    price: Mapping[str, float] | None = None
    as_json: bool = False


def print_estimate(config: RunConfig, options: CardOptions, out: Path, console: Console) -> None:
    """Print the table. The run's folder is not touched."""
    sets = read_cards(options.devices)
    asked = Asked(options.steps, options.hours, dict(options.price or {}))
    check_price(asked.price, sets)
    if config.elastic is not None:
        raise BuildError("elastic", "a peer's step is one of its lanes: remove it to estimate one")
    config = _of_largest_batch(config)
    batch = config.loader.batch_size

    def record(each: CardSet) -> Sequence[TaskGraph]:
        strategy = ShadowStrategy(each.device, each.capability, devices=each.count)
        return _record(config, strategy, out, console)

    with blamed():
        cards = estimate_cards(sets, record)
    data = build_data(config)
    try:
        loader = _time(data.train, config)
        with torch.device("meta"):
            module = build_module(config, data.num_classes)
    finally:
        data.close()
    title = f"{describe_step(module, {'precision': config.trainer.precision})}, batches of {batch}"
    estimate = Estimate(title, cards, asked, loader, list_remarks(sets))
    if options.as_json:
        console.print(json.dumps(estimate.as_dict(), indent=1), highlight=False, markup=False)
    else:
        console.print(estimate.table(), highlight=False, markup=False)


def _of_largest_batch(config: RunConfig) -> RunConfig:
    """The run with its first phase only, whose batches are the largest of all, without files of
    weights."""
    batch = max(phase.batch_size or config.loader.batch_size for phase in config.phases)
    trainer = {"accelerator": "cpu", "devices": 1}
    return config.model_copy(
        update={
            "phases": [config.phases[0].model_copy(update={"batch_size": batch})],
            "loader": config.loader.model_copy(update={"batch_size": batch}),
            "model": config.model.model_copy(update={"weights": None}),
            "trainer": config.trainer.model_copy(update=trainer),
        }
    )


def _record(
    config: RunConfig, strategy: ShadowStrategy, out: Path, console: Console
) -> Sequence[TaskGraph]:
    data = build_data(config)
    try:
        with torch.device("meta"):
            module = build_module(config, data.num_classes)
        switch = build_phase_switch(config)
        berth = replace(berth_alone(console), strategy=lambda _: strategy)
        trainer = build_trainer(config, out, switch, RunLog(out), berth, data)
        return record_fit(trainer, lambda: trainer.fit(module, **data.fit_arguments()))
    finally:
        data.close()


def _time(loader: ReuseLoader, config: RunConfig) -> LoaderSeconds | None:
    """Time the decoding of a batch. A sample that is used several times is decoded once."""
    timed: Any = time_loader(loader, config.trainer.accumulate)
    reuse = config.phases[0].reuse
    return timed and replace(timed, seconds=timed.seconds / reuse)
