"""Claim: with 8 micro-batches a step, a peer that swaps sub-models keeps a consumer card 95 % busy.

    python benchmarks/elastic_simulated.py [--only WORD ...] [--smoke] [--out DIR]

ATOM (Wu, thesis, chapter 3) trains GPT-3 on single cards that hold none of it: weights come in from
the host, gradients go there, and several micro-batches make the loading worth it. Here our planner
does the same on paper: GPT-3 from Small to 175B (as many blocks as the host holds), 1 to 8
micro-batches of 2,048 tokens, cards and links by their published rates.

Method: a step's graph is made up from the model's sizes (swapping/gpt3.py), kernels are priced by a
roofline (swapping/machines.py), the plan is found and proven as for a real step, and the planner's
simulator says how long it takes. No update is in the step: sums of gradients go to the host, where
peers add them up. The update and the reduction are not counted; ATOM's numbers leave them out, too.

Planning all rows takes about an hour of one core. Each row is kept in elastic_simulated.jsonl, and
a row that is there is not planned again: remove the file after a change of the planner.
"""

import argparse
import datetime
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offloading.report import Asked, Report, command, table, write
from provenance import provenance
from swapping.gpt3 import MODELS, STATE, Model, step
from swapping.machines import CARDS, GIB, HOST, LINKS, Card
from swapping.peer import least, planned

from offload.lowering.micro_batches import ONCE
from offload.planning.simulator import least_seconds

RESULTS = Path(__file__).parent / "results"
MICRO_BATCHES = (1, 2, 4, 8)
ASKED = 0.95
"""Of the bound, with 8 micro-batches on an RTX 4090 behind PCIe 4."""
SWAPPED = next(model for model in MODELS if model.name == "6.7B")
"""The model of the rows that vary something else."""
TIGHT = (12, 6)
"""GiB of smaller budgets on the RTX 4090."""
ATOM = (
    ("V100 or weaker, PCIe 3", "175B (2 blocks)", "4", "ATOM", "91.9 %"),
    ("the same four GPUs", "175B (2 blocks)", "4", "PipeDream, localhost", "46.3 %"),
    ("the same four GPUs", "175B (2 blocks)", "4", "GPipe, localhost", "18.3 %"),
)
"""GPU utilisation by nvidia-smi, of the thesis's section 3.5.2. It does not name the GPUs."""


REMARKS = [
    "Simulated: no GPU ran any of it. Utilisation: the work of a step without what is computed"
    " again, over the step's seconds. busy: with what is computed again.",
    "Kernels run at the card's published dense rate with sums in float32 (or at the memory's rate),"
    " links at 80 % of 16 lanes. Slower kernels would hide more.",
    "bound: what no plan can beat (swapping/peer.py). Everything begins and ends on the host.",
    "carried: sums of earlier micro-batches come in and are added to.",
]


@dataclass(frozen=True, slots=True)
class Case:
    """A row."""

    card: Card
    link: str
    model: Model
    micro_batches: int
    budget: int
    carried: bool = False
    """Whether sums of earlier micro-batches come in, to be added to."""

    @property
    def name(self) -> str:
        kept = ", carried" if self.carried else ""
        return f"{self.card.name}, {self.link}, {self.model.name}, {self.micro_batches}{kept}"


def cases(smoke: bool) -> Iterator[Case]:
    card = CARDS[0]
    if smoke:
        tiny = Model("tiny", 3, 256, words=1024, length=128)
        yield from (Case(card, "PCIe 4", tiny, k, 12 << 20, k == 4) for k in (1, 4))
        return
    for other in CARDS:
        for model in MODELS:
            cut = model.cut(HOST, other.element)
            for link in other.links:
                yield from (Case(other, link, cut, k, other.budget) for k in MICRO_BATCHES)
    most = MICRO_BATCHES[-1]
    for model in (MODELS[0], SWAPPED):
        tied = replace(model, name=f"{model.name} tied", tied=True)
        yield Case(card, "PCIe 4", tied, most, card.budget)
    yield Case(card, "PCIe 4", SWAPPED, most, card.budget, carried=True)
    for gib in TIGHT:
        tight = replace(SWAPPED, name=f"{SWAPPED.name} in {gib} GiB")
        yield Case(card, "PCIe 4", tight, most, gib * GIB)


def measured(case: Case) -> dict[str, Any]:
    """A row, by its columns."""
    costs = case.card.costs(LINKS[case.link])
    graph = step(case.model, case.micro_batches, case.card.element, case.carried)
    begin = time.process_time()
    found = planned(graph, costs, case.budget)
    took = time.process_time() - begin
    bound = least(graph, costs, case.budget, case.carried)
    seconds, memgraph = found.simulation.makespan, found.memgraph
    moved = {"h2d": 0, "d2h": 0}
    for node in memgraph.nodes:
        if node.lane in moved:
            moved[node.lane] += node.nbytes
    return {
        "name": case.name, "card": case.card.name, "link": case.link, "model": case.model.name,
        "blocks": case.model.depth, "micro_batches": case.micro_batches, "carried": case.carried,
        "tasks": len(graph.tasks), "seconds": seconds, "least": dict(bound.parts),
        "binds": bound.binds, "utilisation": least_seconds(graph, costs) / seconds,
        "of_the_bound": bound.seconds / seconds,
        "busy": {lane: work / seconds for lane, work in found.simulation.busy.items()},
        "out": moved["d2h"], "in": moved["h2d"],
        "host": memgraph.arenas[-1] + STATE * case.model.weights,
        "recomputed": sum(bool(task.recomputes) for task in memgraph.graph.tasks),
        "order": "; ".join(note for note in memgraph.graph.notes if ONCE in note),
        "tried": list(found.tried), "planning": took,
    }  # fmt: skip


def known_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of earlier runs, by name."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in rows}


def shares(rows: Sequence[dict[str, Any]], key: str) -> str:
    """One line a card, link and model; one column for each number of micro-batches."""
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        if not row["carried"]:
            name = f"{row['model']} ({row['blocks']} blocks)"
            line = lines.setdefault((row["card"], row["link"], name), {})
            line[row["micro_batches"]] = f"{row[key]:.1%}"
    columns = sorted({row["micro_batches"] for row in rows})
    head = ["card", "link", "model", *(f"{k}" for k in columns)]
    return table(head, [[*line, *(of.get(k, "") for k in columns)] for line, of in lines.items()])


def details(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "card", "link", "model", "micro-batches", "step s", "bound s", "set by", "busy",
        "GB in + out", "computed again", "host GB", "order", "planning CPU s",
    ]  # fmt: skip
    lines = [
        [
            row["card"], row["link"], row["model"],
            f"{row['micro_batches']}{' carried' if row['carried'] else ''}",
            f"{row['seconds']:.3f}", f"{max(row['least'].values()):.3f}", row["binds"],
            f"{row['busy']['compute']:.1%}", f"{row['in'] / 1e9:.1f} + {row['out'] / 1e9:.1f}",
            f"{row['recomputed']}", f"{row['host'] / 1e9:.0f}", row["order"] or "one by one",
            f"{row['planning']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--only", nargs="+", default=[], help="words that a row's name must have")
    parser.add_argument("--jobs", type=int, default=1, help="rows planned at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    chosen = [c for c in cases(args.smoke) if all(word in c.name for word in args.only)]
    kept = args.out / f"elastic_simulated{'_smoke' if args.smoke else ''}.jsonl"
    known = known_rows(kept)
    missing = [case for case in chosen if case.name not in known]
    about = provenance()
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(measured, missing):
            share = f"{row['utilisation']:.3f} used, {row['of_the_bound']:.3f} of the bound"
            print(f"{row['name']}: {share} ({row['binds']}), {row['planning']:.0f} s", flush=True)
            row = known[row["name"]] = {**row, "provenance": about}
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    rows = [known[case.name] for case in cases(args.smoke) if case.name in known]
    report = Report(
        "elastic_simulated",
        "Claim: with 8 micro-batches a step, a peer that swaps sub-models keeps its card busy",
        {"tokens a micro-batch": chosen[0].model.length, "host GB": HOST / 1e9},
        rows=rows,
    )
    for row in rows:
        if (row["card"], row["link"], row["micro_batches"]) == ("RTX 4090", "PCIe 4", 8):
            name = f"{row['model']}{', carried' if row['carried'] else ''}: share of the bound"
            report.asked.append(Asked(name, ASKED, row["of_the_bound"], at_least=True))
    report.tables["Utilisation, by micro-batches a step"] = shares(rows, "utilisation")
    head = ["card", "model", "micro-batches", "who", "GPU utilisation"]
    report.tables["ATOM's own figures, from the thesis (not ours)"] = table(head, ATOM)
    report.tables["Share of the bound, by micro-batches a step"] = shares(rows, "of_the_bound")
    report.tables["Rows"] = details(rows)
    report.remarks = REMARKS
    stem = args.out / f"{args.date}_elastic_simulated"
    print(write(report, stem, about, command()), flush=True)


if __name__ == "__main__":
    main()
