"""Part e: ours and every peer on the same model, batch, attention, precision and checkpointing.

    Task (task.py) x budget x Peer (roster.py) = a cell = a process
        ballast -> the peer builds -> 3 steps to warm up, 5 timed -> NVML, host, losses (measure.py)

One file a peer: a context manager that gets a `Setup` and gives a step. It imports its package in
there, so that a peer that is not installed is a line of the table like any other.
"""

from benchmarks.gpu.peers.part import CLAIM, NAME, report, steps

__all__ = ["CLAIM", "NAME", "report", "steps"]
