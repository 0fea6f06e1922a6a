"""The same kill for torchft, hivemind, torchrun and ours: one of three peers, in the middle.

Each of the others trains its own net by its own rules (elastic_peers/), in a virtual environment
of its own under `--work DIR`, which is made once. The victim is killed by SIGKILL some time after
it has noted step `AT`, together with all that it has started; then the survivors' next steps are
timed. Rounds kill at other times of a step. Ours is killed in the middle of a reduce.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic.gaps import gap, happened
from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, format_table
from benchmarks.peers.usage import descendants
from benchmarks.swarms.swarm import Nursery, Swarm, free_ports

HERE = Path(__file__).resolve().parents[1] / "elastic_peers"
PEERS, STEPS, AT, SMOKE_STEPS = 3, 40, 12, 24
WIDTH = 4096
SECONDS = 300.0
AFTER = 2
"""Steps of a survivor after the death, before the run is ended."""


@dataclass(frozen=True, slots=True)
class Other:
    """One of the others: what is installed. Its peer is elastic_peers/WORD_peer.py, by the first
    word of its name."""

    name: str
    packages: tuple[str, ...]
    probe: str
    """What can be imported when it is there."""


OTHERS = (
    Other("torchft nightly", ("torchft-nightly==2026.10.26",), "torchft"),
    Other("hivemind 1.1.12", ("hivemind==1.1.12",), "hivemind"),
    Other("torchrun elastic", (), "torch"),
)


def python_of(other: Other, folder: Path) -> Path:
    """Return the Python that has it, and install it where it is not there yet."""
    place = folder / other.probe
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    probe = [str(python), "-c", f"import {other.probe}"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pip = [str(python), "-m", "pip", "install", "-q", "torch==2.15.*", "numpy", *other.packages]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return python


def notes_of(out: Path) -> list[dict[str, Any]]:
    path = out / "steps.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def commands(
    other: Other, python: Path, folder: Path, steps: int
) -> tuple[list[list[str]], list[list[str]]]:
    """Return what is begun before the peers, and the peers."""
    [port] = free_ports(1)
    usual = {
        "steps": steps, "width": WIDTH, "first": str(folder / "first"), "every": 5,
        "checkpoint": str(folder / "newest.pt"), "lighthouse": f"http://localhost:{port}",
    }  # fmt: skip

    def peer(rank: int, *before: str) -> list[str]:
        given = json.dumps(usual | {"rank": rank, "peers": PEERS, "out": str(folder / f"p{rank}")})
        return [*before, str(HERE / f"{other.name.split()[0]}_peer.py"), given]

    match other.probe:
        case "torchft":
            lighthouse = [str(python.parent / "torchft_lighthouse"), "--bind", f"[::]:{port}",
                          "--min_replicas", "1", "--quorum_tick_ms", "100",
                          "--join_timeout_ms", "2000"]  # fmt: skip
            return [lighthouse], [peer(rank, str(python)) for rank in range(PEERS)]
        case "hivemind":
            return [], [peer(rank, str(python)) for rank in range(PEERS)]
        case _:
            run = [str(python), "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1",
                   "--max-restarts=5", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
                   "--rdzv-id=run"]  # fmt: skip
            # The first holds the store: who holds it must not be killed, or all of them end.
            return [], [peer(rank, *run, f"--rdzv-conf=is_host={rank == 0}")
                        for rank in range(PEERS)]  # fmt: skip


def measured(other: Other, python: Path, folder: Path, steps: int, share: float) -> dict[str, Any]:
    """Begin three peers, kill the last of them, and look at the others. `share`: of a step that is
    over when the victim dies."""
    before, peers = commands(other, python, folder, steps)
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    processes: list[subprocess.Popen[bytes]] = []

    def begin(command: list[str]) -> None:
        with (folder / f"said{len(processes)}.txt").open("wb") as said:
            # A session of its own, so that all that it starts dies with it.
            processes.append(subprocess.Popen(
                command, stdout=said, stderr=said, env=environment, cwd=folder,
                start_new_session=True,
            ))  # fmt: skip

    try:
        for command in (*before, *peers):
            begin(command)
        outs = [folder / f"p{rank}" for rank in range(PEERS)]
        said = [folder / f"said{number}.txt" for number in range(len(before), len(processes))]
        patiently(
            lambda: len(notes_of(outs[-1])) >= AT and all(len(notes_of(o)) >= 3 for o in outs),
            f"step {AT} of {other.name}",
            said[-1],
        )
        time.sleep(share * usual_step([note["when"] for note in notes_of(outs[-1])]))
        killed = time.monotonic()
        end(processes[-1])
        survivors = outs[:-1]
        patiently(
            lambda: all(
                sum(note["when"] > killed for note in notes_of(out)) >= AFTER for out in survivors
            ),
            f"steps of {other.name} after the death",
            said[0],
        )
    finally:
        for process in processes:
            end(process)
    return told(other.name, [notes_of(out) for out in survivors], killed)


def usual_step(whens: Sequence[float]) -> float:
    return statistics.median(later - one for one, later in pairwise(whens))


def told(name: str, survivors: Sequence[list[dict[str, Any]]], killed: float) -> dict[str, Any]:
    gaps, lost = list[float](), 0
    for notes in survivors:
        whens = [note["when"] for note in notes]
        usual = usual_step([when for when in whens if when <= killed])
        gaps.append(max(b - a for a, b in pairwise(whens) if b > killed) - usual)
        at = max(note["step"] for note in notes if note["when"] <= killed)
        again = min(note["step"] for note in notes if note["when"] > killed)
        lost = max(lost, at + 1 - again)
    digests: dict[tuple[bool, int], set[str]] = {}
    for note in (note for notes in survivors for note in notes):
        # A step that is made again has other peers, so other weights.
        digests.setdefault((note["when"] > killed, note["step"]), set()).add(note["digest"])
    unequal = [is_after for (is_after, _), found in digests.items() if len(found) > 1]
    return {
        "name": name,
        "gap": max(gaps),
        "steps made again": lost,
        "unequal before": unequal.count(False),
        "unequal after": unequal.count(True),
    }


def ours(folder: Path, nursery: Nursery, steps: int) -> dict[str, Any]:
    begin = {"do": "hold", "at": "attempt", "step": 0, "until": PEERS}
    dies = {"do": "kill", "at": "mid_reduce", "step": AT, "members": PEERS}
    usual = {"steps": steps, "width": WIDTH, "lanes": 12, "batch": 96}
    with Swarm(folder, nursery) as swarm:
        victim = swarm.peer("dies", **usual, faults=[begin, dies])
        peers = [swarm.peer(f"p{n}", **usual, faults=[begin]) for n in range(PEERS - 1)]
        for peer in peers:
            peer.result(300)
        whole = [peer.out.joinpath("digests.txt").read_text().splitlines() for peer in peers]
        unequal = len({*whole[0]} ^ {*whole[1]}) // 2
        return {"name": "ours", "gap": max(gap(p, happened(victim)) for p in peers),
                "steps made again": 0, "unequal before": 0, "unequal after": unequal}  # fmt: skip


def patiently(is_so: Callable[[], bool], what: str, said: Path) -> None:
    """Wait until something is so. `said`: what a process has printed, for the error."""
    end = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > end:
            last = said.read_text(errors="replace").strip().rpartition("\n")[2]
            raise TimeoutError(f"{what} did not come in {SECONDS:g} s; it last said: {last}")
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it has started, which may have sessions of their own."""
    for pid in (process.pid, *descendants(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def measure(options: Options) -> Report:
    """Without `--peers` only ours is measured."""
    steps = SMOKE_STEPS if options.smoke else STEPS
    report = Report("peers", "a death costs others steps, seconds or equal weights",
                    {"peers": PEERS, "killed at step": AT})  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        with Nursery() as nursery:
            for turn in range(options.rounds):
                report.rows.append(ours(Path(place) / f"ours{turn}", nursery, steps))
        for other in OTHERS if options.work else ():
            assert options.work is not None
            try:
                python = python_of(other, options.work)
                for turn in range(options.rounds):
                    # They end when enough was seen, so they are given more steps than that.
                    folder = Path(place) / f"{other.probe}{turn}"
                    share = (turn + 0.5) / options.rounds
                    report.rows.append(measured(other, python, folder, 100 * STEPS, share))
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                report.remarks.append(f"{other.name}: {error}")
    keys = ("gap", "steps made again", "unequal before", "unequal after")
    report.tables["One of three peers is killed"] = format_table(
        ["", *keys], [[row["name"], *(f"{row[key]:.3g}" for key in keys)] for row in report.rows]
    )
    report.remarks.append(
        "A gap is what a survivor's longest step after the death took longer than a usual one, in"
        " seconds. Unequal: steps after which the survivors' weights differed in a bit."
    )
    if not options.work:
        report.remarks.append("The others were not measured: give --work DIR.")
    return report
