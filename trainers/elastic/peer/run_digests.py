"""What all peers of a swarm must have in common, by key: the anchor compares it at the door."""

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.wire import Manifest


def run_digests(
    module: L.LightningModule,
    optimizer: torch.optim.Optimizer,
    shares: LaneShares,
    settings: Mapping[str, Any],
    alike: Mapping[str, str],
) -> Manifest:
    """Return the digests of this peer's run. `alike`: what the user adds."""
    loader = shares.lanes.loader
    forms = [(name, str(t.dtype), tuple(t.shape)) for name, t in module.state_dict().items()]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    identity = loader.identity.state(in_a_pass=False)
    return Manifest.of(
        {
            **{f"strategy.{key}": str(value) for key, value in settings.items()},
            "seed": str(loader.seed),
            "batch of a lane": str(shares.micro),
            "buffer_batches": str(loader.buffer_batches),
            "model": _digest(type(module).__name__, forms),
            "optimizer": _digest(type(optimizer).__name__, groups),
            "samples": str(len(loader.dataset)),
            "data": _digest(identity),
            "torch": torch.__version__,
            "lightning": L.__version__,
            "python": ".".join(platform.python_version_tuple()[:2]),
            **alike,
        }
    )


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
