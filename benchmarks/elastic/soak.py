"""Random kills at random moments of random peers, with joins, until there were enough of them.

A round is one swarm on four peers and one replay. Each peer gets a random moment at which it is
killed, or none; for each that dies another one comes. Everything is drawn from the round's number,
so a round can be looked at again; `--work DIR` keeps the rounds that are done, and goes on.
"""

import json
import random
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.swarms.faults import PHASES
from benchmarks.swarms.ledger import account
from benchmarks.swarms.swarm import Nursery, Process, Swarm, until

KILLS, SMOKE_KILLS = 100, 3
PEERS = 4
STEPS = 120
LANES, SAMPLES, REUSE = 8, 200, 2
HEARTBEAT = 30.0
"""Long: what is counted here are samples, and a busy machine shall expel nobody."""
USUAL = {"steps": STEPS, "lanes": LANES, "checkpoints": 10, "sum": "fast"}


def one_round(folder: Path, nursery: Nursery, seed: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps with four peers, of which most die, and replay their logs."""
    dice = random.Random(seed)
    usual = {**USUAL, "steps": steps}
    begin = {"do": "hold", "at": "attempt", "step": 0, "until": PEERS}
    first = usual | {"faults": [begin]}
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
    with Swarm(folder, nursery, heartbeat=HEARTBEAT) as swarm:
        stays = swarm.peer("stays", **first)
        living: list[Process] = [
            swarm.peer(f"p{n}", **mortal(dice, first, steps)) for n in range(3)
        ]
        came, deaths = len(living), 0
        while stays.code is None:
            until(
                lambda: stays.code is not None or any(p.code is not None for p in living),
                "a death or the end", 300, stays.said,
            )  # fmt: skip
            for peer in [p for p in living if p.code is not None]:
                living.remove(peer)
                deaths += peer.code == -9
                if stays.code is None and stays.step < steps - 10:
                    living.append(swarm.peer(f"p{came}", **mortal(dice, usual, steps)))
                    came += 1
        ends = [peer.result() for peer in (stays, *living) if peer.wait() == 0]
        found = account([p.out for p in swarm.peers], LANES, steps, SAMPLES, [REUSE])
        replay = swarm.replay(swarm.peers, **usual).result(300)
        # A newcomer that comes when the run has ended is refused: it was in nobody's way.
        late = "SwarmRefused: the run has ended"
        wrong = [r["error"] for r in ends if r["error"] and not r["error"].startswith(late)]
        return {
            "seed": seed, "steps": steps, "serves": found.serves, "kills": deaths,
            "joins": came - 3, "lost": len(found.lost), "twice": len(found.twice),
            "diverged": len(found.diverged), "replayed": replay["compared"],
            "mismatches": int(replay["digest"] != ends[0]["digest"] or replay["compared"] != steps),
            "errors": wrong, "what": asdict(found) | {"replay": replay["error"]},
            "gaps": [seconds for result in ends for _, seconds in result["gaps"]],
        }  # fmt: skip


def mortal(dice: random.Random, usual: dict[str, Any], steps: int) -> dict[str, Any]:
    """The settings of a peer that dies at a moment of its life, if it lives so long."""
    moment = dice.choice([*PHASES, "lane", "gate", "forming", "copying", "giving"])
    step = dice.randrange(2, steps)
    death = {"do": "kill", "at": moment, "step": 0 if moment == "copying" else step}
    return {**usual, "faults": [*usual.get("faults", []), death]}


def measure(options: Options) -> Report:
    """`repeats` says nothing here: there are rounds until there were enough kills."""
    wanted, steps = (SMOKE_KILLS, 30) if options.smoke else (KILLS, STEPS)
    report = Report("soak", "no death costs a sample or a bit", {"peers": PEERS, "steps": steps})
    with (
        nullcontext(str(options.work)) if options.work else tempfile.TemporaryDirectory() as place,
        Nursery() as nursery,
    ):
        done = Path(place) / "rounds.jsonl"
        done.parent.mkdir(parents=True, exist_ok=True)
        rows = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
        while sum(row["kills"] for row in rows) < wanted:
            row = one_round(Path(place) / f"round{len(rows)}", nursery, len(rows), steps)
            rows.append(row)
            with done.open("a") as file:
                file.write(json.dumps(row) + "\n")
    report.rows = rows
    total = {key: sum(row[key] for row in rows) for key in
             ("kills", "joins", "serves", "lost", "twice", "diverged", "mismatches")}  # fmt: skip
    errors = [error for row in rows for error in row["errors"]]
    report.tables["All rounds together"] = format_table([*total, "errors"], [
        [*(str(value) for value in total.values()), str(len(errors))]
    ])  # fmt: skip
    report.asked = [
        Target("kills", wanted, total["kills"], at_least=True),
        *(Target(key, 0, total[key]) for key in ("lost", "twice", "diverged", "mismatches")),
        Target("peers that ended with an error", 0, len(errors)),
    ]
    report.remarks = [*errors, "mismatches: rounds whose replay had another digest at any step"]
    return report
