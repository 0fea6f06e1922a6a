"""Makes the plans of a peer's lanes for `perfect-train --check` of a YAML with `elastic:` and
`offload:`.

A fit is started for every batch size that the phases have. It is left after its first lane, so no
step is made, and nothing is logged or saved.
"""

from pathlib import Path

from lightning.pytorch.loggers.logger import DummyLogger
from rich.console import Console

from perfect.assembly import (
    berth_alone,
    build_data,
    build_module,
    build_phase_switch,
    build_trainer,
    watched,
)
from perfect.commands.plans import PhasePlan
from perfect.config.schema import RunConfig
from perfect.errors import BuildError
from perfect.runs.record import RunLog
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.lane_plan_strategy import LanePlanned


def plan_lanes(config: RunConfig, out: Path, console: Console) -> list[PhasePlan]:
    """Return the plan of a lane beside the update, for each batch size of the phases."""
    names: dict[int, list[str]] = {}
    for phase in config.phases:
        names.setdefault(phase.batch_size or config.loader.batch_size, []).append(phase.name)
    return [
        _plan(_with_batch_size(config, size), tuple(phases), out, console)
        for size, phases in names.items()
    ]


def _with_batch_size(config: RunConfig, size: int) -> RunConfig:
    phases = [phase.model_copy(update={"batch_size": size}) for phase in config.phases]
    loader = config.loader.model_copy(update={"batch_size": size})
    return config.model_copy(update={"loader": loader, "phases": phases})


def _plan(config: RunConfig, phases: tuple[str, ...], out: Path, console: Console) -> PhasePlan:
    assert config.elastic is not None
    data = build_data(config)
    try:
        module = build_module(config, data.num_classes)
        switch = build_phase_switch(config)
        trainer = build_trainer(config, out, switch, RunLog(out), berth_alone(console), data)
        trainer.loggers = [DummyLogger()]
        with watched(trainer):
            if data.datamodule is not None:
                trainer.fit(module, datamodule=data.datamodule)
            else:
                trainer.fit(module, data.train, data.holdout)
    except LanePlanned as planned:
        micro = config.loader.batch_size // config.elastic.lanes
        return PhasePlan(phases, micro, planned.plan)
    except CannotBeElastic as error:
        raise BuildError("offload", str(error)) from error
    finally:
        data.close()
    raise AssertionError("the fit ended before its first lane")
