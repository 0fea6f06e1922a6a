"""How well a swarm's peers are used, predicted from a few numbers.

step = lanes of the busiest peer | totals over the wire | headers, vote
utilisation = the time in which equal peers would compute all samples / the time of a step
"""

import math
from dataclasses import dataclass

COMMIT_SECONDS = 0.01
"""Two headers and a vote, as a rule."""
FAST_BYTES, EXACT_BYTES = 8.0, 12.0
"""A number of the total goes out once in parts, and comes back whole: 4 + 4 bytes, or 8 + 4."""
ENOUGH_LANES = 8
"""With fewer lanes a peer, some peers often wait for others."""
ASKED = 0.9


@dataclass(frozen=True, slots=True)
class Nodes:
    """The peers that are reckoned with."""

    peers: int
    bits_per_second: float
    parameters: int
    seconds_per_sample: float
    exact: bool = False


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The parts of a step, in seconds."""

    compute: float
    wire: float
    commit: float
    utilisation: float


def predict(nodes: Nodes, global_batch: int, lanes: int) -> NodeUse:
    """Return what a step of `global_batch` samples in `lanes` lanes takes."""
    wire = wire_seconds(nodes)
    ideal = global_batch * nodes.seconds_per_sample / nodes.peers
    compute = ideal / _balance(nodes.peers, lanes)
    commit = COMMIT_SECONDS if nodes.peers > 1 else 0.0
    return NodeUse(compute, wire, commit, ideal / (compute + wire + commit))


def wire_seconds(nodes: Nodes) -> float:
    """Return how long the totals are on the wire: every peer sends and takes all but its part."""
    each = EXACT_BYTES if nodes.exact else FAST_BYTES
    share = (nodes.peers - 1) / nodes.peers
    return share * each * nodes.parameters * 8 / nodes.bits_per_second


def least_global_batch(nodes: Nodes, lanes: int, asked: float = ASKED) -> int | None:
    """Return the least batch that keeps the utilisation at `asked`; None where no batch does."""
    left = 1 - asked / _balance(nodes.peers, lanes)
    if left <= 0:
        return None
    commit = COMMIT_SECONDS if nodes.peers > 1 else 0.0
    seconds = asked * (wire_seconds(nodes) + commit) / left
    samples = seconds * nodes.peers / nodes.seconds_per_sample
    return max(1, math.ceil(samples / lanes - 1e-9)) * lanes


def _balance(peers: int, lanes: int) -> float:
    """Return the mean number of lanes of a peer over that of the busiest one."""
    return lanes / peers / math.ceil(lanes / peers)
