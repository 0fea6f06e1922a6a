"""Engines that run the nodes of a step, one a file. `work.py` says what an engine is given.

May import: errors, gate, graph, planning, running.drivers, torch_seams.
"""
