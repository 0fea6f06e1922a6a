"""Does reuse keep the accuracy? The tables that were registered before their runs.

Claim   With 55 % fewer decodes our recipe ends within 0.5 points of no reuse under the same
        schedule (12 seeds, paired, TOST), and far above no reuse that is tuned for as many decodes.
Method  results/DATE_preregistration.md: hypotheses, rows, seeds, tests. CIFAR-10, the pilot net.
        Tables in order, seeds outermost; a run that is there already is skipped, and one that was
        cut short goes on at its checkpoint.
Run     OMP_NUM_THREADS=1 python benchmarks/accuracy_evidence.py run --data DIR
        python benchmarks/accuracy_evidence.py report

        DIR/cifar-10-batches-py -> runs -> OUT/DATE_TABLE.jsonl -> report
"""

import argparse
import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accuracy.bench import Bench
from accuracy.data import Pictures, cifar_pictures
from accuracy.evidence import Line, Lines, render, scores
from accuracy.recipes import Task
from accuracy.registered import Entry, Table, registered_tables
from accuracy.train import Record, Watch, train
from provenance import commit, machine, versions

HERE = Path(__file__).parent
CPU = torch.device("cpu")


def run(table: Table, out: Path, pictures_of: Callable[[Task], Pictures]) -> None:
    """Everything of the table that is missing. A bench is kept while rows share a task."""
    lines = Lines(out, table)
    about = {"commit": commit(), "versions": versions(), "machine": machine()}
    watch = Watch(out / f"{table.name}.ckpt", math.inf)
    benches: dict[Task, Bench] = {}
    for seed, entry in missing(table, lines):
        if entry.task not in benches:
            benches[entry.task] = Bench(entry.task, pictures_of(entry.task), CPU)
        bench = benches[entry.task]
        line = {**summary(bench, entry, train(bench, entry.run, seed, watch)), **about}
        lines.add({"table": table.name, **line})
        watch.checkpoint.unlink(missing_ok=True)
        print(
            f"{table.name}  seed {seed}  {100 * line['test']:.2f} % test "
            f" {100 * line['selection']:.2f} % selection  {line['decodes']} decodes "
            f" {line['cpu_seconds']:.0f} CPU s  {line['wall_seconds']:.0f} s  {entry.run.name}",
            flush=True,
        )


def missing(table: Table, lines: Lines) -> list[tuple[int, Entry]]:
    done = {(line["recipe"], line["seed"]) for line in lines.read()}
    return [(seed, row) for seed, row in table.in_order() if (row.run.name, seed) not in done]


def summary(bench: Bench, entry: Entry, record: Record) -> Line:
    """A record without its curve, and what it is a record of."""
    task, pictures = entry.task, bench.pictures
    kept = (
        "seed", "test", "selection", "test_last", "test_ema", "selection_last", "selection_ema",
        "decodes", "steps", "cpu_seconds", "wall_seconds",
    )  # fmt: skip
    return {
        "recipe": record["name"], **{key: record[key] for key in kept},
        "weights": record["reported"],
        "test_pictures": len(pictures.test), "selection_pictures": len(pictures.selection),
        "train": task.train, "batch_size": task.batch_size, "lr": task.lr,
        "precision": "bfloat16" if task.bfloat16 else "float32",
        "buffer_batches": entry.run.buffer_batches,
        "switches": [(switch["at"], switch["reason"]) for switch in record["switches"]],
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def cifar(root: Path) -> Callable[[Task], Pictures]:
    """Pictures are loaded once for all tasks that split the training set in the same way."""
    known: dict[tuple[int, ...], Pictures] = {}

    def pictures_of(task: Task) -> Pictures:
        sizes = (task.train, task.holdout, task.selection)
        if sizes not in known:
            known[sizes] = cifar_pictures(root, task, CPU)
        return known[sizes]

    return pictures_of


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
    parser.add_argument("--out", type=Path, default=HERE / "results")
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
    pictures_of = cifar(args.data)
    for table in tables:
        run(table, args.out, pictures_of)


if __name__ == "__main__":
    main()
