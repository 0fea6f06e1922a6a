"""The schema of the section `elastic`: a run that several nodes train together.

    elastic: {secret_file: swarm.key, lanes: 64}        perfect-train run.yaml --join 10.0.0.1:29400

`loader.batch_size` (and that of a phase) is the global batch: the samples of a step over all peers.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from perfect.config.fields import Count, Flag, Rate, Section

UNITS = ("", "k", "M", "G", "T")


def parse_bandwidth(given: object) -> float:
    """Return the bits a second of `400Mbps` or `1Gbps`."""
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)bps", given) if isinstance(given, str) else None
    )
    if match is None or not float(match.group(1)):
        raise ValueError(f"must be a bandwidth such as 400Mbps or 1Gbps, not {given!r}")
    return float(match.group(1)) * 1000.0 ** UNITS.index(match.group(2))


def _bandwidth(given: object) -> object:
    parse_bandwidth(given)
    return given


Bandwidth = Annotated[str, BeforeValidator(_bandwidth)]


class ElasticConfig(Section):
    """The arguments of `ElasticStrategy`, but for the anchors' addresses: they are those of the
    option --join."""

    secret_file: str
    """All peers and the anchor have a copy of it."""
    lanes: Count = 64
    """A step is dealt in so many equal parts. Eight or more for each peer keep all of them busy."""
    sum: Literal["fast", "exact"] = "fast"
    """With exact, the weights do not depend on which peer computed what."""
    host: str | None = None
    """The address of this node, by which the others reach it (None: the one that leads to the
    anchor)."""
    insecure_network: Flag = False
    """Allows a host that offers the unprotected traffic of gradients to every network."""
    loose_key: Flag = False
    """Allows a secret file that others may use, as where a container cannot set modes."""
    peers: Count | None = None
    """The number of peers that --check assumes. A run takes every peer that comes."""
    network: Bandwidth | None = None
    """The bandwidth between peers (1Gbps) that --check assumes."""
    seconds_per_sample: Rate | None = None
    """The time of a forward and backward pass on one peer that --check assumes (None: as this
    folder's run has measured it)."""


OF_A_NODE = (
    "secret_file", "host", "insecure_network", "loose_key", "peers", "network",
    "seconds_per_sample",
)  # fmt: skip
"""These keys may differ from node to node, and from one start of a peer to the next."""

KEPT_BY_NODE = (
    "checkpoint", "data.root", *(f"elastic.{key}" for key in OF_A_NODE), "loader.cache",
    "loader.cache_bytes", "loader.cache_dir", "loader.cache_key", "loader.worker_kind",
    "loader.workers", "loggers", "model.weights", "offload", "trainer.accelerator",
    "trainer.threads",
)  # fmt: skip
"""Where data lies, how a node decodes it, its device's budget and what it writes: these keys may
differ between the peers of a swarm."""


def shared_keys(config: dict[str, Any]) -> dict[str, str]:
    """Return the keys of a complete configuration (`dump_config`) that all peers must share, as
    flat texts: {"optimizer": {"lr": 0.1}} -> {"config.optimizer.lr": "0.1"}."""
    return {f"config.{path}": text for path, text in _leaves(config, "")}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if path in KEPT_BY_NODE:
        return
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{number}")
    else:
        yield path, str(value)
