"""The same training under other projects' elasticity. Each file is a peer, run by their Python.

    python hivemind_peer.py '{"rank": 0, "out": FOLDER, "steps": 40, ...}'

Every peer writes FOLDER/steps.jsonl, a line after each global step: the step, the time on this
machine's monotonic clock, the digest and the sum of the weights. They import nothing of ours.
"""
