"""The table of part e: who is there, how long a step takes, beside the ceiling and the bound."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.gpu.part import Found, Step
from benchmarks.gpu.peers.roster import CEILING, OURS, PEERS
from benchmarks.gpu.peers.task import ladder, tasks
from benchmarks.harness.report import Report, Target, format_spread, format_table

NAME = "peers"
CLAIM = "Claim: at one budget a planned step is quicker than every peer's"
BUDGETS: Mapping[str, Sequence[str]] = {
    "7B LoRA 8x1K": ("8 GiB", "16 GiB"),
    "GPT-2 1.5B 8x1K": ("8 GiB",),
}
LARGEST_BUDGET = "16 GiB"
LARGEST = ("ours, cuda", "FSDP2")
SMOKE_BUDGET = "1 GiB"
COMPARED, TRAINED = "gpu.peers.measure:compared", "gpu.peers.measure:largest"


def steps(smoke: bool) -> Sequence[Step]:
    compared = [cell for name in tasks(smoke) for cell in _cells(name, smoke)]
    largest = [
        f"{name}; {SMOKE_BUDGET if smoke else LARGEST_BUDGET}; {peer}"
        for peer in LARGEST
        for name in ladder(smoke)
    ]
    if smoke:  # one process each: starting one is what takes time
        return [Step(COMPARED, tuple(compared)), Step(TRAINED, tuple(largest))]
    # The peers' own kernels are compiled at their first use: minutes, once.
    return [
        *(Step(COMPARED, (cell,), minutes=2) for cell in compared),
        *(Step(TRAINED, (cell,), minutes=2) for cell in largest),
    ]


def _cells(name: str, smoke: bool) -> Iterator[str]:
    yield f"{name}; none; {CEILING}"
    for budget in (SMOKE_BUDGET,) if smoke else BUDGETS[name]:
        yield from (f"{name}; {budget}; {key}" for key, p in PEERS.items() if p.budgets)


def report(found: Found) -> Report:
    said = Report(NAME, CLAIM, {"warm-up": 3, "repeats": 5, "precision": "bfloat16"})
    for (task, budget), peers in _groups(found).items():
        cells = [f"{task}; {budget}; {peer}" for peer in peers]
        if not any(cell in found.rows or cell in found.problems for cell in cells):
            continue  # nothing of it is measured yet
        title = f"{task}, {budget}"
        said.tables[title] = _table(found, task, budget, peers)
        said.asked += _asked(found, task, budget, peers)
    said.tables["What fits: seconds a step"] = _what_fits(found)
    said.tables["Who they are"] = format_table(
        ["peer", "how"], [[name, p.note] for name, p in PEERS.items()]
    )
    said.remarks = [
        "Every peer has a process and the same weights, words, attention (SDPA) and checkpoints;"
        " a ballast leaves the budget and 1 GiB (context, libraries) of the device free.",
        "device: the rise that NVML sees, the context in it; pinned: torch's allocator, of ours"
        " the arena; group: the rise of the cgroup's memory.current; loss: of the first and of the"
        " last step, on one batch.",
        "Not here, because its step is another one: QLoRA keeps the frozen weights in 4 bits, some"
        " 4 GB of 7B, and moves nothing. Its answers are those of rounded weights.",
        "of no offload: its seconds over this row's. bound: of our plan, by this machine's rates.",
    ]
    return said


def _groups(found: Found) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in (c for step in steps(found.smoke) if step.run == COMPARED for c in step.cells):
        task, budget, peer = cell.split("; ")
        if budget != "none":
            groups.setdefault((task, budget), []).append(peer)
    return groups


def _median(found: Found, task: str, budget: str, peer: str) -> float | None:
    return found.number(f"{task}; {budget}; {peer}", "median")


def _ours(found: Found, task: str, budget: str) -> float | None:
    there = [m for p in OURS if (m := _median(found, task, budget, p)) is not None]
    return min(there, default=None)


def _asked(found: Found, task: str, budget: str, peers: Sequence[str]) -> list[Target]:
    """Ours over theirs: at most 1, or what the issue asks of 7B LoRA at 8x1K."""
    ours = _ours(found, task, budget)
    asked: list[Target] = []
    for name in peers:
        theirs, peer = _median(found, task, budget, name), PEERS[name]
        if ours is None or theirs is None or name in OURS or not peer.budgets:
            continue
        most = 1 / peer.asked if "LoRA" in task else 1.0
        asked.append(Target(f"{task}, {budget}: ours over {name}", most, ours / theirs))
    return asked


def _table(found: Found, task: str, budget: str, peers: Sequence[str]) -> str:
    ceiling = _median(found, task, "none", CEILING)
    lines: list[list[str]] = []
    for name, at in [(CEILING, "none"), *((peer, budget) for peer in peers)]:
        cell = f"{task}; {at}; {name}"
        row = found.rows.get(cell)
        if row is None:
            why = found.problems.get(cell, "not yet measured").replace("|", "/")
            lines.append([name, why, *[""] * 9])
            continue
        median, bound = row["median"], row.get("bound_s")
        lines.append([
            name, format_spread(row["values"]), f"{ceiling / median:.0%}" if ceiling else "",
            f"{median / bound:.2f} ({row['binds']})" if bound else "",
            f"{row['device_mib']:,.0f}", f"{row.get('torch_mib', 0):,.0f}",
            f"{row['rss_mib']:,.0f}", f"{row['group_mib']:,.0f}", f"{row['pinned_mib']:,.0f}",
            f"{row['first']:.4f}, {row['last']:.4f}", row["version"],
        ])  # fmt: skip
    head = ["peer", "seconds a step", "of no offload", "over the bound", "device MiB",
            "torch's peak MiB", "resident MiB", "group MiB", "pinned MiB", "loss",
            "version"]  # fmt: skip
    return format_table(head, lines)


def _what_fits(found: Found) -> str:
    """Rungs by peers: a time, or why not."""
    rungs = list(ladder(found.smoke))
    budget = SMOKE_BUDGET if found.smoke else LARGEST_BUDGET
    lines: list[list[str]] = []
    for peer in LARGEST:
        line = [peer]
        for rung in rungs:
            cell = f"{rung}; {budget}; {peer}"
            seconds = found.number(cell, "median")
            why = found.problems.get(cell, "not yet measured").replace("|", "/")
            line.append(why if seconds is None else f"{seconds:.2f}")
        lines.append(line)
    return format_table([f"within {budget}", *rungs], lines)
