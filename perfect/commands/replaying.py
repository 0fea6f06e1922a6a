"""Trains a swarm's run again in one process, from its logs, and compares what it comes to."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch import Tensor

from offload.sizes import format_count
from perfect.assembly import (
    Berth,
    berth_in_replay,
    build_data,
    build_module,
    build_phase_switch,
    build_trainer,
    named_classes,
)
from perfect.config.schema import CheckpointConfig, PlateauSwitch, RunConfig, dump_config
from perfect.config.yaml_reader import read_config
from perfect.errors import RunError
from perfect.runs.record import RunLog
from trainers.elastic.errors import LogDamaged, ReplayDiffers
from trainers.elastic.peer.replay_strategy import ReplayStrategy
from trainers.read_checkpoint import read_checkpoint

NEVER = 1 << 60
"""So many steps no run has."""


def replay(runs: Sequence[Path], console: Console, *, trust: bool = False) -> str:
    """Return what is equal. Raise `ReplayDiffers` with the first step that is not. `trust`: import
    the classes that the configuration names, which runs their code."""
    logs = [log for run in runs for log in _logs_of(run)]
    config = trusted_config(runs[0], trust=trust)
    budget = None if config.offload is None else config.offload.budget
    strategy = ReplayStrategy(logs, budget=budget)
    if not strategy.history.steps:
        raise LogDamaged(
            f"the logs of {', '.join(map(str, runs))} do not reach back to the first step: give the"
            " folders of peers that were there, too"
        )
    finals = {
        final: read_checkpoint(final, "state_dict", dict)
        for final in (run / "final.ckpt" for run in runs)
        if final.exists()
    }
    with tempfile.TemporaryDirectory(prefix="perfect-replay-") as scratch:
        module, ended = _train(config, berth_in_replay(console, strategy), Path(scratch))
    said = f"equal: {format_count(strategy.replayed.compared, 'step')}"
    if not ended or not finals:
        return said
    for final, theirs in finals.items():
        _compare(module.state_dict(), theirs, final)
    return f"{said}, and the final weights"


def trusted_config(run: Path, *, trust: bool) -> RunConfig:
    """Return the configuration of a run. Raise `RunError` if it names classes, and `trust` is not
    given: their import runs code."""
    config = read_config(run / "config.yaml")[0]
    named = ", ".join(named_classes(dump_config(config)))
    if named and not trust:
        raise RunError(
            f"{run / 'config.yaml'} names {named}, whose import may run any code; give --trust"
            " if you trust who wrote the folder and the code"
        )
    return config


def _logs_of(run: Path) -> list[Path]:
    logs = sorted((run / "elastic").glob("*.jsonl"))
    if not logs or not (run / "config.yaml").exists():
        raise LogDamaged(
            f"{run} is no run folder of a peer: it has no config.yaml with elastic/*.jsonl beside"
        )
    return logs


def _train(config: RunConfig, berth: Berth, scratch: Path) -> tuple[L.LightningModule, bool]:
    """Return the trained module, and whether all phases have ended."""
    without: dict[str, Any] = {
        "loggers": [],
        "checkpoint": CheckpointConfig(every_steps=NEVER),
        "elastic": None,
        "loader": config.loader.model_copy(update={"cache": None}),  # it would write a folder
    }
    config = config.model_copy(update=without)
    L.seed_everything(config.seed, verbose=False)
    data = build_data(config)
    try:
        module = build_module(config, data.num_classes)
        switch = build_phase_switch(config)
        log = RunLog(scratch, berth.clock)
        trainer = build_trainer(config, scratch, switch, log, berth, data)
        if not isinstance(config.switch, PlateauSwitch):
            trainer.limit_val_batches = 0  # Only a plateau depends on what validation sees.
        trainer.fit(module, **data.fit_arguments())
        with switch.averaged(module):
            state = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(state)
        return module, switch.policy.finished
    finally:
        data.close()


def _compare(mine: Mapping[str, Tensor], theirs: Mapping[str, Any], final: Path) -> None:
    for name in {**mine, **theirs}:
        if not _is_equal(mine.get(name), theirs.get(name)):
            raise ReplayDiffers(f"{name} in {final} is not what the replay comes to")


def _is_equal(one: Any, other: Any) -> bool:
    """Whether these are equal tensors. `torch.equal` raises if they are of different kinds."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    kinds = [(tensor.dtype, tensor.layout, tensor.device.type) for tensor in (one.cpu(), other)]
    return kinds[0] == kinds[1] and torch.equal(one.cpu(), other)
