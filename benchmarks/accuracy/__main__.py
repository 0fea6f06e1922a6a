"""Does reuse keep the accuracy? The tables that were registered before their runs.

Claim   With 55 % fewer decodes our recipe ends within 0.5 points of no reuse under the same
        schedule (12 seeds, paired, TOST), and far above no reuse that is tuned for as many decodes.
Method  results/DATE_preregistration.md: hypotheses, rows, seeds, tests. CIFAR-10, the pilot net.
        Tables in order, seeds outermost; a run that is there already is skipped.
Baseline no reuse under the same schedule. Ceiling: its accuracy.
Run     OMP_NUM_THREADS=1 python -m benchmarks.accuracy run --data DIR
        python -m benchmarks.accuracy report

        DIR/cifar-10-batches-py -> runs -> OUT/DATE_TABLE.jsonl -> report
"""

import argparse
import datetime
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.accuracy.data import load_cifar
from benchmarks.accuracy.evidence import Line, Lines, render, scores
from benchmarks.accuracy.registered import Table, registered_tables
from benchmarks.accuracy.train import train
from benchmarks.harness.command import RESULTS
from benchmarks.harness.machine import describe_machine, list_versions, read_commit


def run_table(table: Table, data: Path, out: Path) -> None:
    """Every run of the table that is missing."""
    lines = Lines(out, table)
    about = {"commit": read_commit(), "versions": list_versions(), "machine": describe_machine()}
    done = {(line["recipe"], line["seed"]) for line in lines.read()}
    load = cache(partial(load_cifar, data))
    for seed, entry in table.in_order():
        if (entry.run.name, seed) in done:
            continue
        task, pictures = entry.task, load(entry.task.sizes)
        line: Line = {
            "table": table.name, "recipe": entry.run.name, "seed": seed,
            **train(task, pictures, entry.run, seed),
            "test_pictures": len(pictures.test), "selection_pictures": len(pictures.selection),
            "train": task.train, "batch_size": task.batch_size, "lr": task.lr,
            "precision": "float32", "buffer_batches": entry.run.buffer_batches,
            "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **about,
        }  # fmt: skip
        lines.add(line)
        print(
            f"{table.name}  seed {seed}  {100 * line['test']:.2f} % test "
            f" {100 * line['selection']:.2f} % selection  {line['decodes']} decodes "
            f" {line['cpu_seconds']:.0f} CPU s  {line['wall_seconds']:.0f} s  {entry.run.name}",
            flush=True,
        )


def report(tables: Sequence[Table], out: Path) -> str:
    found = scores(list(registered_tables().values()), out)
    lines = [line for by_seed in found.values() for line in by_seed.values()]
    commits = sorted({line["commit"] for line in lines})
    text = [render(table, found) for table in tables]
    return "\n".join([*text, f"{len(lines)} runs, of commits: {', '.join(commits) or 'none'}."])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    tables = list(registered_tables())
    parser = argparse.ArgumentParser(description="the registered accuracy tables")
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--data", type=Path, help="folder that holds cifar-10-batches-py")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    args = parser.parse_args(argv)
    if args.what == "run" and args.data is None:
        parser.error("--data: a run needs the folder that holds cifar-10-batches-py")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    tables = [registered_tables()[name] for name in args.tables]
    if args.what == "report":
        print(report(tables, args.out))
        return
    torch.set_num_threads(1)
    for table in tables:
        run_table(table, args.data, args.out)


if __name__ == "__main__":
    main()
