"""Which points of a grid have equal steps, so that one capture and one measurement say what all
take.

They are equal where the complete configurations are, but for what no capture sees. A key that is
not named here keeps points apart, and so does every new one.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from perfect.assembly import build_data, build_phases
from perfect.commands.check import batches_of
from perfect.config.grid import Point
from perfect.config.schema import RunConfig, dump_config
from perfect.method.phases import Phase
from trainers.fleet.deciding.events import Planned


def equal_steps(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points in groups of equal steps."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(repr(_seen(point.config)), []).append(point)
    return [*groups.values()]


def _seen(config: RunConfig) -> dict[str, Any]:
    """Return the configuration without what no capture sees. An optimizer reads its learning rate
    at every step, and a schedule only writes it. A seed draws other numbers of the same shapes,
    unless batches have several shapes or a class of the user's own makes something of it."""
    plain = dump_config(config)
    plain["optimizer"]["lr"] = None
    for phase in plain["phases"]:
        phase |= {"passes": None, "steps": None, "lr": phase["lr"] is not None}
    own = config.model.class_path or config.data.class_path
    if own is None and config.data.name != "lines":
        plain["seed"] = None
    return plain


def plans_of(group: Sequence[Point], made: Planned) -> dict[str, Planned]:
    """Return what every point of a group would say, where its first one said `made`."""
    lengths = _lengths(group)
    each = made.validation_seconds / max(1, made.left)
    return {
        point.name: replace(
            made,
            job=point.name,
            left=lengths.get(point.name, made.left),
            validation_seconds=each * lengths.get(point.name, made.left),
            input=made.input and f"{made.input} of seed {point.config.seed}",
        )
        for point in group
    }


def _lengths(group: Sequence[Point]) -> Mapping[str, int]:
    """Return the steps of every point; none where all are as long as the first one."""
    phases = {point.name: build_phases(point.config)[0] for point in group}
    lengths = {tuple((p.passes, p.steps) for p in found) for found in phases.values()}
    if len(lengths) == 1:
        return {}
    config = group[0].config
    with closing(build_data(config, prepare=False)) as data:

        def steps(phase: Phase) -> int:
            batches = batches_of(config, phase, data.train)
            return phase.steps or (phase.passes or 0) * -(-batches // config.trainer.accumulate)

        return {name: sum(map(steps, found)) for name, found in phases.items()}
