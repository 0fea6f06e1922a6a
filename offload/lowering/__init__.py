"""Passes from TaskGraph to TaskGraph, one a file. `passes.py` names them and runs them in order.

May import: errors, graph, planning, program, torch_seams.
"""
