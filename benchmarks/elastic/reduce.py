"""The canonical reduce against gloo's own all-reduce, over links of 400 Mbps."""

import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.swarms.network import Network, available
from benchmarks.swarms.swarm import Nursery, Process
from trainers.elastic.reducing.canonical import all_gather_bytes, reduce_in_order
from trainers.elastic.reducing.graveyard import Graveyard
from trainers.elastic.reducing.group import GroupPlace, form_group

MEMBERS, MEGABITS = 3, 400
NUMBERS, SMOKE_NUMBERS = 8 << 20, 1 << 16
TURNS = 5
SECONDS = 120.0


class FileStore:
    """Values as files of a folder that all members see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: bytes) -> None:
        part = self.folder / f"{key.encode().hex()}.part"
        part.write_bytes(value)
        part.rename(part.with_suffix(""))

    def get(self, key: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        path = self.folder / key.encode().hex()
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"nobody has left {key} in {timeout:g} s")
            time.sleep(0.005)
        return path.read_bytes()


def always() -> None:
    """The generation lives."""


def member(settings: dict[str, Any]) -> None:
    """One member: ours and gloo's in turns, each after a round of headers."""
    torch.set_num_threads(1)
    rank, size = settings["rank"], MEMBERS
    graveyard = Graveyard()
    place = GroupPlace(1, rank, size, settings["host"])
    group = form_group(FileStore(Path(settings["store"])), place, SECONDS, always, graveyard)
    mine = torch.randn(settings["numbers"], generator=torch.Generator().manual_seed(rank))
    out = torch.empty_like(mine)
    found: dict[str, list[float]] = {"ours": [], "ring": []}
    for _ in range(settings["turns"] + 1):
        for name in found:
            all_gather_bytes(group, b"now", 10, always)
            began = time.monotonic()
            if name == "ours":
                reduce_in_order(group, mine, out, always)
            else:
                ring(group, mine.clone())
            all_gather_bytes(group, b"done", 10, always)
            found[name].append(time.monotonic() - began)

    group.abandon(graveyard)
    graveyard.close()
    told = {name: seconds[1:] for name, seconds in found.items()}  # the first ones warm up
    Path(settings["out"], "result.json").write_text(json.dumps(told))


def ring(group: Any, tensor: torch.Tensor) -> None:
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.SUM
    options.timeout = timedelta(seconds=SECONDS)
    group._living().allreduce([tensor], options).wait()


def measure(options: Options) -> Report:
    """`repeats`: groups."""
    numbers = SMOKE_NUMBERS if options.smoke else NUMBERS
    emulated = available()
    report = Report(
        "reduce",
        "sums in a fixed order cost what a ring costs",
        {"members": MEMBERS, "numbers": numbers,
         "network": f"namespaces at {MEGABITS} Mbps" if emulated else "localhost"},
    )  # fmt: skip
    network = Network(MEMBERS, MEGABITS) if emulated else nullcontext()
    with tempfile.TemporaryDirectory() as place, network as net, Nursery() as nursery:
        for turn in range(options.rounds):
            folder = Path(place) / str(turn)
            (folder / "store").mkdir(parents=True)
            members = []
            for rank in range(MEMBERS):
                where = (
                    {"host": "127.0.0.1"} if net is None
                    else {"host": net.hosts[rank], "namespace": net.names[rank]}
                )  # fmt: skip
                members.append(Process(nursery, {
                    "program": "call", "function": "benchmarks.elastic.reduce:member", **where,
                    "out": str(folder / f"m{rank}"), "store": str(folder / "store"), "rank": rank,
                    "numbers": numbers, "turns": 1 if options.smoke else TURNS,
                }))  # fmt: skip
            found = [one.result(600) for one in members]
            for name in ("ours", "ring"):
                slowest = [max(several) for several in zip(*(f[name] for f in found), strict=True)]
                report.rows.append({"turn": turn, "what": name, "seconds": slowest})
    ours = [statistics.median(r["seconds"]) for r in report.rows if r["what"] == "ours"]
    theirs = [statistics.median(r["seconds"]) for r in report.rows if r["what"] == "ring"]
    report.tables["Seconds of a reduce"] = format_table(
        ["what", "seconds"], [["ours", format_spread(ours)], ["gloo's ring", format_spread(theirs)]]
    )
    ratio = statistics.median(round_ratios(ours, theirs))
    report.asked = [Target("ours over the ring", 1.05, ratio)]
    if not emulated:
        report.remarks.append("No namespaces could be made here: this is localhost, not a network.")
    return report
