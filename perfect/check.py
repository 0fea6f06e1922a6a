"""What a configuration would run, worked out without training: `perfect-train --check`."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from loaders.reuse import batches_per_pass
from loaders.sources import samples_per_rank
from loaders.storage import Slab
from perfect.assembly import (
    build_data,
    build_module,
    build_phase_switch,
    build_phases,
    build_trainer,
)
from perfect.config import RunConfig, dump_config
from perfect.folder import RunFolder
from perfect.record import RunLog
from perfect.stop import StopSignal


def print_plan(config: RunConfig, out: Path, console: Console) -> None:
    """Builds everything, so that whatever is wrong is found here, and decodes one sample."""
    data = build_data(config)
    build_module(config, data.num_classes)
    phases, rule = build_phases(config)
    stop = StopSignal(console)
    build_trainer(config, out, build_phase_switch(config), RunLog(out), stop, data)
    loader = data.train
    samples = samples_per_rank(len(loader.dataset), config.trainer.devices)

    table = Table("phase", "passes", "reuse", "batch", "steps", "decodes", "learning rate")
    steps_in_all = decodes_in_all = served_in_all = largest = 0
    for phase in phases:
        batch = phase.batch_size or loader.batch_size
        largest = max(largest, batch)
        per_pass = batches_per_pass(samples, batch, phase.reuse, loader.mode, loader.drop_last)
        steps = phase.steps or (phase.passes or 0) * -(-per_pass // config.trainer.accumulate)
        passes = steps * config.trainer.accumulate / per_pass
        served = round(passes * samples * phase.reuse)
        steps_in_all += steps
        served_in_all += served
        decodes_in_all += round(passes * samples)
        rate = f"{phase.lr.kind} {phase.lr.lr:g}" if phase.lr else "the module's"
        table.add_row(
            phase.name, f"{passes:g}", str(phase.reuse), str(batch), f"{steps:,}",
            f"{round(passes * samples):,}", rate,
        )  # fmt: skip
    console.print(table)

    say = [
        f"training samples {len(loader.dataset):,}; hold-out {_size(data.holdout)};"
        f" test {_size(data.test)}",
        f"steps {steps_in_all:,}; served {served_in_all:,}; decodes {decodes_in_all:,}"
        f" ({1 - decodes_in_all / served_in_all:.0%} fewer than serving each decode once)",
        f"buffer {_buffer_bytes(loader, largest) / 2**20:.1f} MiB"
        f" ({loader.buffer_batches} batches of at most {largest})",
    ]
    if rule is not None:
        say.append(
            f"plateau: the reuse phase ends when {config.switch.rule} fires, from epoch"
            f" {rule.not_before:g} on, window {rule.window}; the lengths above are the latest start"
        )
    say.append(_time(config, out, steps_in_all))
    for line in say:
        console.print(line, highlight=False)


def _size(loader: object) -> str:
    dataset = getattr(loader, "dataset", None)
    return f"{len(dataset):,}" if dataset is not None else "none"


def _buffer_bytes(loader: object, batch: int) -> int:
    dataset, batches = loader.dataset, loader.buffer_batches  # type: ignore[attr-defined]
    return Slab(dataset[0], 1).nbytes * batch * batches


def _time(config: RunConfig, out: Path, steps: int) -> str:
    folder = RunFolder(out)
    if folder.config.exists() and folder.open(dump_config(config)) != "new":
        run = folder.read()
        if run.get("steps"):
            seconds = run["wall_seconds"] / run["steps"] * steps
            return f"time about {seconds:,.0f} s, as measured over {run['steps']:,} steps in {out}"
    return f"time unknown until some of it has run in {out}"
