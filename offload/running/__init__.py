"""Runs a plan. `runner.py` runs one job; engines run nodes, drivers drive devices.

May import: errors, gate, graph, memory, planning, program, running.drivers,
    running.engines, sizes, torch_seams.
"""
