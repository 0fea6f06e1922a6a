"""The net, the data and what is written down: the same for all."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

BATCH = 32
"""Of one peer; three peers have 96 samples a global step."""


def settings() -> dict[str, Any]:
    return json.loads(sys.argv[1])


def net(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(
        torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, 256, generator=dice)
    return inputs, inputs[:, :10].argmax(1)


def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(data[0]), data[1])


def meet(out: str, peers: int) -> None:
    """Wait until all peers have come here, so that none trains alone at the beginning."""
    Path(out).mkdir(parents=True, exist_ok=True)
    Path(out, "here").touch()
    while len(list(Path(out).parent.glob("p*/here"))) < peers:
        time.sleep(0.02)


class Notes:
    """What a peer writes down."""

    def __init__(self, out: str) -> None:
        Path(out).mkdir(parents=True, exist_ok=True)
        self._path = Path(out, "steps.jsonl")

    def step(self, step: int, model: torch.nn.Module, **more: Any) -> None:
        found, total = hashlib.blake2b(digest_size=8), 0.0
        for p in model.parameters():
            found.update(p.detach().numpy().tobytes())
            total += float(p.detach().double().abs().sum())
        told = {"step": step, "when": time.monotonic(), "digest": found.hexdigest(), "sum": total}
        with self._path.open("a") as file:
            file.write(json.dumps(told | more) + "\n")
