"""The record of each phase of a run, as a row of run.json, and what PhaseSwitch remembers."""

from dataclasses import dataclass, field, replace

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
    """The learning rate of each parameter group."""
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
