"""A user's step -> a TaskGraph: one run under fake tensors is recorded and built into tasks.

`capture.py` is the entrance, `recorder.py` records the tape, and `guards.py` refuses what a graph
must not freeze.

May import: caching, errors, gate, graph, lowering, measuring, optimizer, program, torch_seams,
    watching.
"""
