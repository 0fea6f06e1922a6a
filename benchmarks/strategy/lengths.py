"""24 sequence lengths in turns: seconds a step in the first pass, which records, and later.

    pass 1   100  96  92 ...  8   every step another length: plans are made
    pass 2   100  96  92 ...  8   the same lengths again: the graphs are kept

Each row trains the same GPT-2 on the same batches for five passes, in a process of its own. A row
whose run is long has many steps to come; one whose run is short ends with these passes. `padded`
rows have the batches padded to the lengths that `lengths: auto` of perfect-train would choose. CPU
seconds; ratios within a round.
"""

import logging
import statistics
import warnings
from time import process_time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.strategy.nets import Task, tokens
from benchmarks.strategy.pair import digest_training, make_quiet_trainer
from offload.memory.cpu_shim import available
from perfect.models.gpt2 import Gpt2, Gpt2Shape
from perfect.text import PadToLengths, lengths_for
from trainers import OffloadStrategy

ROUNDS = 7
SHAPE, WORDS, ROWS = Gpt2Shape(layers=4, heads=4, width=128, positions=128), 512, 2
LENGTHS = tuple(range(100, 4, -4))
"""The longest first: a share as a budget is one of what the first batch needs."""
PASSES = 5
LONG = 1_000_000
"""Steps of a run that has them all before it."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"plain": True},
    "budget none, the run ends here": {},
    "budget none, a long run": {"steps": LONG},
    "budget 60%": {"budget": "60%"},
    "plain, padded": {"plain": True, "padded": True},
    "budget 60%, padded": {"budget": "60%", "padded": True},
}
BASE = {name: "plain, padded" if "padded" in name else "plain" for name in KINDS}


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    rounds = []
    for _ in range(repeats):
        rounds.append({name: run_in_fresh_process(one, name, smoke) for name in KINDS})
    report = Report(
        "lengths",
        "Claim: of 24 lengths in turns, the second pass costs what plain Lightning's does",
        {"model": f"GPT-2 of {SHAPE.layers} layers, {SHAPE.width} wide, {WORDS} words",
         "batch": f"{ROWS} x 8 to 100 tokens", "passes": PASSES, "rounds": repeats,
         "optimizer": "AdamW", "time": "CPU s of the process"},
        rows=rounds,
    )  # fmt: skip
    lines = []
    for name in KINDS:
        found = [one_round[name] for one_round in rounds]
        second, last = (
            [mine[name]["passes"][n] / mine[BASE[name]]["passes"][n] for mine in rounds]
            for n in (1, -1)
        )
        steps = found[0]["steps"]
        lines.append([
            name, str(found[0]["graphs"]), "yes" if found[0]["eager"] else "no",
            *(format_spread([1e3 * row["passes"][n] / steps for row in found])
              for n in range(PASSES)),
            format_spread(second), format_spread(last),
        ])  # fmt: skip
        if not name.startswith("plain"):
            report.asked.append(
                Target(f"{name}: second pass, x plain", 1.1, statistics.median(second))
            )
            report.asked.append(Target(f"{name}: last pass, x plain", 1.1, statistics.median(last)))
    differ = sum(one_round[n]["digest"] != one_round[BASE[n]]["digest"] for one_round in rounds
                 for n in KINDS)  # fmt: skip
    report.asked.append(Target("final states that differ", 0, float(differ)))
    padded = rounds[0]["budget 60%, padded"]
    report.asked.append(
        Target("budget 60%, padded: graphs", len(padded["lengths"]), float(padded["graphs"]))
    )
    report.tables["CPU ms a step"] = format_table(
        ["run", "graphs", "went eager", *(f"pass {n + 1}" for n in range(PASSES)),
         "pass 2, x plain", "last pass, x plain"], lines
    )  # fmt: skip
    said = [row["said"] for row in rounds[0].values() if row["said"]]
    report.remarks = [
        f"padded: to {', '.join(map(str, padded['lengths']))} tokens, {padded['waste']:.1%} more"
        " than the texts have.",
        "x plain: of a padded row, plain Lightning's on the same padded batches.",
        *(f"What a run said: {line}" for line in said),
    ]
    return report


class Watch(L.Callback):
    """CPU seconds of every pass. The run ends after `passes`, however long it was to be."""

    def __init__(self, passes: int) -> None:
        self._left, self.seconds = passes, list[float]()
        self._begun = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._begun = process_time()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds.append(process_time() - self._begun)
        self._left -= 1
        trainer.should_stop = not self._left


def one(name: str, smoke: bool) -> dict[str, Any]:
    """In a process of its own."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    available()  # otherwise the first plan waits for the compiler
    kind = KINDS[name]
    torch.manual_seed(0)
    shape = Gpt2Shape(layers=1, heads=2, width=32, positions=128) if smoke else SHAPE
    lengths = LENGTHS[:10] if smoke else LENGTHS
    net = Gpt2(shape, WORDS, dropout=0.0)
    batches = [tokens(WORDS, ROWS, length) for length in lengths]
    chosen = lengths_for(dict.fromkeys(lengths, 1), 1, max(lengths))
    if kind.get("padded"):
        pad = PadToLengths(chosen)
        batches = [pad(list(zip(ids, targets, strict=True))) for ids, targets in batches]
    strategy: Any = "auto"
    if not kind.get("plain"):
        strategy = OffloadStrategy(kind.get("budget"))
    watch = Watch(PASSES)
    trainer = make_quiet_trainer(
        strategy, watch, max_epochs=-1, max_steps=kind.get("steps", PASSES * len(batches))
    )
    module = Task(net, "AdamW")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    said = [str(one.message) for one in caught if "trains eagerly" in str(one.message)]
    real = sum(lengths)
    return {
        "passes": watch.seconds, "steps": len(batches), "eager": bool(said),
        "said": said[0] if said else "", "digest": digest_training(module, trainer.optimizers[0]),
        "graphs": 0 if strategy == "auto" else strategy.spent.plans, "lengths": chosen,
        "waste": sum(ids.shape[1] for ids, _ in batches) / real - 1,
    }  # fmt: skip
