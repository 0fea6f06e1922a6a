"""Decides where every byte lies and what waits for what. Pure: every file.

`search.py` tries plans, `planner.py` makes one, `verify.py` proves it, `simulator.py` times it.

May import: errors, graph, sizes.
"""
