"""Builds the phases and a PhaseSwitch from config.phases, config.switch and config.ema."""

import math
from dataclasses import replace

from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.config.schema import (
    BudgetSwitch,
    PlateauSwitch,
    RunConfig,
)
from perfect.errors import BuildError, PhaseError
from perfect.method.phases import Phase, budget_split, check_phases
from perfect.method.plateau import PlateauRule
from perfect.method.schedule import Schedule


def build_phases(config: RunConfig) -> tuple[list[Phase], PlateauRule | None]:
    """Return the phases with their lengths, and the plateau rule if there is one."""
    phases = [
        Phase(**{**dict(p), "lr": p.lr and Schedule(**{**dict(p.lr), "part": tuple(p.lr.part)})})
        for p in config.phases
    ]
    switch = config.switch
    if isinstance(switch, BudgetSwitch | PlateauSwitch) and switch.total and switch.fresh_passes:
        phases = _split_budget(phases, switch.fresh_passes, switch.total)
    problems = check_phases(phases)
    if problems:
        raise BuildError("phases", "; ".join(problems))
    if not isinstance(switch, PlateauSwitch):
        return phases, None
    total = sum((p.passes or 0) * p.reuse for p in phases)
    rule = PlateauRule(
        window=switch.window or max(12, math.ceil(0.075 * total)),
        accuracy_slope=switch.accuracy_slope,
        loss_slope=switch.loss_slope,
        hits=switch.hits,
        not_before=switch.earliest * total,
    )
    if config.data.class_path is None and not config.data.holdout:
        raise BuildError(
            "data.holdout",
            "is 0, but the plateau rule watches held-out accuracy: set some training samples aside",
        )
    return phases, rule


def _split_budget(phases: list[Phase], fresh: float, total: float) -> list[Phase]:
    if len(phases) != 2 or phases[0].reuse < 2 or phases[1].reuse != 1:
        raise BuildError(
            "switch",
            "a budget needs two phases, the first with reuse >= 2, the second with reuse 1",
        )
    if any(p.passes is not None or p.steps is not None for p in phases):
        raise BuildError("phases", "passes and steps have no effect beside a budget: remove them")
    try:
        split = budget_split(fresh, total, phases[0].reuse)
    except PhaseError as error:
        raise BuildError("switch", str(error)) from error
    return [replace(phases[0], passes=split.pretrain), replace(phases[1], passes=split.finetune)]


def build_phase_switch(config: RunConfig) -> PhaseSwitch:
    phases, rule = build_phases(config)
    monitor = config.switch.monitor if isinstance(config.switch, PlateauSwitch) else "val_accuracy"
    try:
        return PhaseSwitch(
            phases,
            plateau=rule,
            monitor=monitor,
            ema_decay=config.ema.decay,
            validate_every=config.trainer.validate_every,
        )
    except PhaseError as error:
        raise BuildError("phases", str(error)) from error
