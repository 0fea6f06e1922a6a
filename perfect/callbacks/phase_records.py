"""The record of each phase of a run, as a row of run.json, and what PhaseSwitch remembers."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from perfect.method.phases import Phase


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """What happened in one phase of a run."""

    name: str
    reuse: int
    first_step: int
    last_step: int
    passes: int
    decoded: int
    lr_start: float | None
    lr_end: float | None
    reason: str


def record_step(
    records: list[PhaseRecord], index: int, phase: Phase, step: int, decoded: int, lr: float
) -> None:
    """Add a batch of optimizer step `step` to the record of phase number `index`, the last of
    `records`. `decoded` counts the samples that all ranks have decoded in the run so far."""
    if len(records) <= index:
        before = sum(r.decoded for r in records)
        records.append(
            PhaseRecord(
                phase.name, phase.reuse, step, step, 0, decoded - before, lr, lr, "unfinished"
            )
        )
    before = sum(r.decoded for r in records[:-1])
    records[-1] = replace(records[-1], last_step=step, decoded=decoded - before, lr_end=lr)


@dataclass(slots=True)
class GivenSettings:
    """What the module, the loader and the Trainer were given by the user."""

    batch_size: int = 0
    lrs: list[float] = field(default_factory=list)
    decays: list[float] = field(default_factory=list)
    accumulate: int = 1
    limit_batches: int | float = 1.0
    log_every: int = 50


@dataclass(slots=True)
class PassState:
    """The pass that is under way."""

    limit: int | None = None
    """Its batches."""
    prepared_length: int = 0
    updates_seen: int = 0
    """The optimizer steps before the present batch."""
    owes_end: bool = False
    """Whether it was trained to its last batch, and the policy has not counted it yet."""


log = logging.getLogger(__name__)

SAMPLE_LOSSES = "sample_losses"
"""A training_step may return one loss per sample under this key. The plateau rule then sees the
loss of first serves even if a batch mixes them with later serves."""


class FirstServeLoss:
    """Sums the loss of first serves between two validations."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._warned = False

    def add(self, outputs: Any, first: np.ndarray) -> None:
        """Add a batch with what training_step returned. `first`: which serves are first ones."""
        each = outputs.get(SAMPLE_LOSSES) if isinstance(outputs, dict) else None
        if each is not None:
            mask = torch.from_numpy(first).to(each.device)
            self._sum += float((each.detach() * mask).sum())
            self._count += int(first.sum())
        elif first.all():
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is None:  # training_step skipped the batch
                return
            self._sum += float(loss) * len(first)
            self._count += len(first)
        elif not self._warned:
            self._warned = True
            log.warning(
                "the plateau rule sees accuracy only, because a batch mixes first and later serves"
                " and training_step does not return '%s' (one loss per sample)",
                SAMPLE_LOSSES,
            )

    def take_mean(self) -> float | None:
        """Return the mean since the last call, and begin anew; None if there was no first serve."""
        mean = self._sum / self._count if self._count else None
        self._sum, self._count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"first_serve_loss": self._sum, "first_serves": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum, self._count = state["first_serve_loss"], state["first_serves"]
