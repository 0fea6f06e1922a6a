"""The programs of a swarm as processes: an anchor, peers, and replays."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from support.secret_files import write_secret

from benchmarks.swarms.swarm import Nursery, Process, free_ports, until

Recipe = dict[str, Any]


class Programs:
    """Processes in one folder, in which every peer has a run folder of its name."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.nursery = nursery
        self.folder = folder
        self.begun: list[Process] = []
        self.secret = write_secret(folder)

    def begin(self, program: str, name: str, *arguments: str) -> Process:
        out = self.folder / "said" / f"{name}-{len(self.begun)}"
        process = Process(
            self.nursery,
            {
                "program": program, "arguments": arguments, "name": name,
                "cwd": str(self.folder), "out": str(out),
            },
        )  # fmt: skip
        self.begun.append(process)
        return process

    def anchor(self, *options: str, heartbeat: float = 30.0) -> Process:
        self.join = f"127.0.0.1:{free_ports(1)[0]}"
        given = ("--listen", self.join, "--secret-file", "secret", "--heartbeat", str(heartbeat))
        given += options
        anchor = self.begin("perfect.anchor", "anchor", *given)
        until(lambda: "listening" in anchor.said(), "the anchor", 60, anchor.said)
        return anchor

    def peer(self, name: str, recipe: str = "run.yaml") -> Process:
        options = ("--join", self.join, "--name", name, "--out", name)
        return self.begin("perfect.train", name, recipe, *options)

    def replay(self, *runs: str) -> Process:
        return self.begin("perfect.replay", "replay", *runs)

    def write(self, recipe: Recipe, name: str = "run.yaml") -> None:
        (self.folder / name).write_text(yaml.safe_dump(recipe, sort_keys=False))

    def lines(self, name: str) -> list[dict[str, Any]]:
        log = self.folder / name / "elastic" / f"{name}.jsonl"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def step(self, name: str) -> int:
        return max((line["commit"] for line in self.lines(name) if "commit" in line), default=-1)

    def until_step(self, process: Process, step: int) -> None:
        name = process.name
        until(lambda: self.step(name) >= step, f"step {step} of {name}", 120, process.said)

    def run(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "run.json").read_text())

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / name / "final.ckpt", weights_only=True)["state_dict"]


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
