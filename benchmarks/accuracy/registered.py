"""The tables of results/DATE_preregistration.md, in the order in which they are run.

    2026-11-22  parity         our recipe and its small buffer against no reuse, same schedule
                equal_decodes  no reuse with as many decodes as our recipe, batch and rate tuned
                buffer_share   larger training sets: the buffer's number of batches or its share?
    2026-11-24  equal_decodes_extended  the second table, past the edge at which its best row was
                repeats_and_buffer      how often a sample is served (R) x batches in the buffer (K)
                competitors             other ways to reuse, at our decodes and our updates
                plateau_rule            the rule that watches for a plateau, on long runs
    2026-11-26  parity_again   our recipe against no reuse, by the order of decision 0034

Each table was fixed before the first of its runs. What is changed afterwards belongs in a new
registration. Seeds 0 to 2 are left out because the recipe was chosen on them. Accuracies are those
of the averaged weights (EMA) in every row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.orders import Order
from benchmarks.accuracy.recipes import Run, Stretch, Task, cosine, with_ema, without_reuse, wsd
from perfect.method.phases import Phase
from perfect.method.plateau import PlateauRule

CONTROL = "no reuse, wsd, late decay, ema"
RECIPE = "best: wsd55 roll12 re ema"
SMALL_BUFFER = "wsd55 roll3 re ema"

PILOT = Task("pilot", 8000, 1000, batch_size=320, epochs=24, lr=0.3, warmup=2, selection=10_000)
STABLE = 0.6
"""Share of a constant-then-decay run before the decay, where nothing else is said."""
LATER, LATEST = "2026-11-24", "2026-11-26"
"""The second registration, and the third."""
KEYED = "keyed order: "
"""Begins the names of rows by the order of decision 0034. All others had the one before it."""
MARGIN = 0.5
"""Points: a mean difference surely within them is called parity."""
DECODES = 86_400
"""Of our recipe on 8,000 pictures."""
LATE = 19.96
"""Epoch at which the pilot's late decay begins, of 24."""
SHARE = 0.12
"""Of 8,000 pictures: three batches."""
LONG_CONTROL, LONG_FIXED = "T120 no reuse, late decay", "T120 switch at the latest start"
LONG_RULE = "T120 switch by the plateau rule"
REPEATS, BUFFERS = (2, 3, 4, 6, 8), (1, 3, 12)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a table."""

    task: Task
    run: Run


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    date: str = "2026-11-22"
    """Of its registration."""
    parity: bool = False
    """Whether parity was registered to be judged from it."""

    def in_order(self) -> Iterator[tuple[int, Entry]]:
        """Seeds outermost, so that all rows have the same number of them at any moment."""
        return ((seed, entry) for seed in self.seeds for entry in self.entries)


def registered_tables() -> dict[str, Table]:
    few = (3, 4, 5)
    tables = (
        Table("parity", _parity(), tuple(range(3, 15)), parity=True),
        Table("equal_decodes", tuple(_equal_decodes()), few),
        Table("buffer_share", tuple(_buffer_share()), few),
        Table("equal_decodes_extended", tuple(_equal_decodes_extended()), few, LATER),
        Table("repeats_and_buffer", tuple(_repeats_and_buffer()), few, LATER),
        Table("competitors", tuple(_competitors()), few, LATER),
        Table("plateau_rule", tuple(_plateau_rule()), few, LATER),
        Table("parity_again", _parity_again(), tuple(range(15, 39)), LATEST, parity=True),
    )
    return {table.name: table for table in tables}


def _parity() -> tuple[Entry, ...]:
    """The recipe's buffer has decoded further ahead, so its reuse lasts a little longer; the rate
    falls from the same epoch on."""

    def reusing(name: str, epochs: float, buffer: int) -> Run:
        stretches = [(3, epochs), (1, PILOT.epochs - epochs)]
        phases = with_ema(wsd(PILOT, stretches, LATE))
        return Run(name, phases, CONTROL, "rolling", buffer)

    small = reusing(SMALL_BUFFER, LATE, 3)
    control = without_reuse(CONTROL, small.phases)
    return tuple(Entry(PILOT, run) for run in (control, reusing(RECIPE, 20.3, 12), small))


def _parity_again() -> tuple[Entry, ...]:
    control, recipe, _ = (entry.run for entry in _parity())
    against = KEYED + control.name
    return (
        Entry(PILOT, replace(control, name=against)),
        Entry(PILOT, replace(recipe, name=KEYED + recipe.name, against=against)),
    )


def _equal_decodes() -> Iterator[Entry]:
    for batch in (80, 144, 320):
        for factor in (0.5, 1.0, 2.0):
            rate = round(factor * PILOT.lr * math.sqrt(batch / PILOT.batch_size), 3)
            yield _without_reuse(batch, rate)


def _equal_decodes_extended() -> Iterator[Entry]:
    for batch, rates in ((80, (0.0375, 0.01875)), (40, (0.0265, 0.053, 0.106))):
        for rate in rates:
            yield _without_reuse(batch, rate)


def _without_reuse(batch: int, rate: float) -> Entry:
    """Warm-up and the average's horizon are the share of the run that they are in our recipe."""
    epochs = DECODES / (PILOT.train // batch * batch)
    twelfth = epochs / 12
    task = replace(
        PILOT, batch_size=batch, lr=rate, epochs=epochs, warmup=twelfth, ema_epochs=twelfth
    )
    phases = with_ema(wsd(task, [(1, epochs)], STABLE * epochs))
    return Entry(
        task, Run(f"no reuse, {DECODES} decodes, batch {batch}, rate {rate:g}", phases, RECIPE)
    )


def _buffer_share() -> Iterator[Entry]:
    """As many epoch-equivalents for every set. The rows of 8,000 pictures are those of parity,
    where three batches are also 12 % of the set."""
    for train, selection in ((24_000, 10_000), (40_000, 9000)):
        task = replace(PILOT, train=train, selection=selection)
        base = f"{train // 1000}k no reuse"
        yield Entry(task, Run(base, with_ema(wsd(task, [(1, task.epochs)], LATE))))
        share = round(SHARE * train / task.batch_size)
        for says, buffer in (("3 batches", 3), ("12 batches", 12), ("12 % of the set", share)):
            # The buffer's samples owe about a serve each when the switch cuts their pass short.
            reusing = min(19.8 + (buffer + 1) * task.batch_size / train, LATE)
            stretches = [(3, reusing), (1, task.epochs - reusing)]
            phases = with_ema(wsd(task, stretches, LATE))
            yield Entry(
                task, Run(f"{train // 1000}k buffer of {says}", phases, base, "rolling", buffer)
            )


def repeats_row(reuse: int, buffer: int) -> str:
    """The row of a cell of R x K. One cell is a row of parity's."""
    if (reuse, buffer) == (3, 3):
        return SMALL_BUFFER
    return f"reuse {reuse}, rolling buffer of {buffer}"


def _repeats_and_buffer() -> Iterator[Entry]:
    """One moment of the switch for all: what a larger buffer decodes ahead shows in the decodes."""
    for reuse in REPEATS:
        for buffer in BUFFERS:
            name = repeats_row(reuse, buffer)
            if name != SMALL_BUFFER:
                stretches = [(reuse, LATE), (1, PILOT.epochs - LATE)]
                phases = with_ema(wsd(PILOT, stretches, LATE))
                yield Entry(PILOT, Run(name, phases, CONTROL, "rolling", buffer))


def _plateau_rule() -> Iterator[Entry]:
    """Five times as long as the other tables, with the rule that best_plateau.yaml has."""
    total = 5 * PILOT.epochs
    latest = LATE / PILOT.epochs * total
    yield Entry(PILOT, Run(LONG_CONTROL, with_ema(wsd(PILOT, [(1, total)], latest))))
    rule = PlateauRule(not_before=0.25 * total)
    for name, end, plateau in (
        (LONG_FIXED, latest, None), ("T120 switch at 72", 72.0, None), (LONG_RULE, latest, rule)
    ):  # fmt: skip
        phases = with_ema(wsd(PILOT, [(3, end), (1, total - end)], end))
        yield Entry(PILOT, Run(name, phases, LONG_CONTROL, "rolling", 12, plateau=plateau))


@dataclass(frozen=True, slots=True)
class Competitor:
    """A way to reuse without a stretch of fresh samples: three serves a decode, then two, which
    makes as many decodes and updates as our recipe has."""

    name: str
    order: Order
    buffer: int = 1
    reaugment: bool = True
    thrice: float = 7.2
    """Epochs of three serves."""

    def stretches(self) -> Sequence[Stretch]:
        return (3, self.thrice), (2, PILOT.epochs - self.thrice)


COMPETITORS = (
    Competitor("batch echoing", "immediate"),
    # 18 batches of serves hold about 12 batches of different pictures. They have decoded ahead when
    # a pass is cut, which a longer stretch of three serves makes up for.
    Competitor("example echoing", "echoed", buffer=18, thrice=8.0),
    Competitor("repeated augmentation", "in-batch"),
    Competitor("minibatch persistency", "immediate", reaugment=False),
)


def _competitors() -> Iterator[Entry]:
    for rate in (0.15, 0.3, 0.6):
        task = replace(PILOT, lr=rate)

        def row(name: str, phases: Sequence[Phase], order: Order, buffer: int, task: Task) -> Entry:
            run = Run(f"{name}, rate {task.lr:g}", with_ema(phases), RECIPE, order, buffer)
            return Entry(task, run)

        for other in COMPETITORS:
            under = {
                "cosine": cosine(task, other.stretches(), reaugment=other.reaugment),
                "our rates": wsd(task, other.stretches(), LATE, reaugment=other.reaugment),
            }
            for rates, phases in under.items():
                yield row(f"{other.name}, {rates}", phases, other.order, other.buffer, task)
        # Without a corner no pass is cut at epoch 19.96: a little fewer epochs make our decodes.
        ours = cosine(task, [(3, 20.08), (1, PILOT.epochs - 20.08)])
        yield row("our recipe, cosine", ours, "rolling", 12, task)
