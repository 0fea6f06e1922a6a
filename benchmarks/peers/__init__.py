"""What `python -m benchmarks.peers` is made of: one file a peer, and the processes they run in.

contract (what a peer is) -> rows (which peers, with which options) -> child (a peer in a process of
its own; usage: what that process costs) <- children (the parent's end of it) -> report

A file is named after what a peer does, not after its package: `peers/ffcv.py` would read like it.
"""
