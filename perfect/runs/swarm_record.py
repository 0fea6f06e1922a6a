"""What run.json tells of a peer's swarm, from the lines of the peer's log (elastic/NAME.jsonl).

generations   when each began, with whom, and why it ended
gaps          how long this peer waited where a generation ended unplanned
peers         of each peer: the lanes that it has added, and at how many steps; the samples of the
              lanes, and how long it computed at them; for how long it was seen as a member; the
              bytes of sums that it has sent to other members

All is counted from the step at which this peer came in. What is sent in the last step's reduce is
not among the bytes (trainers/elastic/deciding/header.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Line = Mapping[str, Any]
PLANNED = "somebody came"
"""Why a generation ends without a gap."""


@dataclass(slots=True)
class _PeerSums:
    """What is counted of one of them."""

    name: str
    lanes: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    present: float = 0.0
    bytes_sent: int = 0
    said: int | None = None
    """The bytes that it had told of last."""

    def add(self, samples: int, seconds: float, sent: int, present: float) -> None:
        """Count what it has told at a step. `present`: the seconds since the step before."""
        self.samples += samples
        self.seconds += seconds
        self.present += present
        if self.said is not None:  # a peer that joins again under its name begins at 0
            self.bytes_sent += sent - self.said if sent >= self.said else sent
        self.said = sent

    def plain(self) -> dict[str, Any]:
        told = asdict(self) | {key: round(getattr(self, key), 3) for key in ("seconds", "present")}
        del told["said"]
        return told


def swarm_record(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the section `elastic` of run.json."""
    first = next((line["time"] for line in lines), 0.0)
    generations: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    peers: dict[str, _PeerSums] = {}
    began: dict[str, Any] = {}
    lanes = 0
    latest: float | None = None
    for line in lines:
        if "run" in line:
            lanes = line["run"]["lanes"]
        elif "begins" in line:
            began = {"step": line["begins"], "with": line["with"]}
            latest = None
            for peer in peers.values():
                peer.said = None  # what it has sent while this peer was away is not counted
        elif "generation" in line:
            latest = line["time"] if latest is None else latest
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
                peer = peers.setdefault(name, _PeerSums(name))
                peer.lanes += len(added)
                peer.steps += 1
            for name, samples, seconds, sent in line.get("peers", ()):
                present = line["time"] - latest if latest is not None else 0.0
                peers.setdefault(name, _PeerSums(name)).add(samples, seconds, sent, present)
            latest = line["time"]
    return {
        "lanes": lanes,
        "began": began,
        "generations": generations,
        "gaps": gaps,
        "peers": [peer.plain() for peer in peers.values()],
    }
