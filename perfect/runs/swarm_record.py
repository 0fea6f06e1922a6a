"""What run.json tells of a peer's swarm, from the lines of the peer's log (elastic/NAME.jsonl).

generations   when each began, with whom, and why it ended
gaps          how long this peer waited where a generation ended unplanned
peers         how many lanes each peer has added, and at how many steps
"""

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
PLANNED = "somebody came"
"""Why a generation ends without a gap."""


def swarm_record(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the section `elastic` of run.json."""
    first = next((line["time"] for line in lines), 0.0)
    generations: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    peers: dict[str, dict[str, int]] = {}
    began: dict[str, Any] = {}
    lanes = 0
    for line in lines:
        if "run" in line:
            lanes = line["run"]["lanes"]
        elif "begins" in line:
            began = {"step": line["begins"], "with": line["with"]}
        elif "generation" in line:
            if generations:
                generations[-1]["ended"] = PLANNED
            generations.append(
                {
                    "generation": line["generation"],
                    "step": line["step"],
                    "seconds": round(line["time"] - first, 3),
                    "members": line["members"],
                    "steps": 0,
                    "ended": None,
                }
            )
        elif "gap" in line:
            gaps.append({"step": line["step"], "seconds": line["gap"], "why": line["why"]})
            if len(generations) > 1:  # the line comes when the next generation has begun
                generations[-2]["ended"] = line["why"]
        elif "commit" in line:
            if generations:
                generations[-1]["steps"] += 1
            for name, added in line["added"]:
                peer = peers.setdefault(name, {"lanes": 0, "steps": 0})
                peer["lanes"] += len(added)
                peer["steps"] += 1
    return {
        "lanes": lanes,
        "began": began,
        "generations": generations,
        "gaps": gaps,
        "peers": [{"name": name, **counts} for name, counts in peers.items()],
    }
