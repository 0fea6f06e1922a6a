"""Measures kernels and copies on this machine: profiles of a graph, rates of the machine.

May import: caching, errors, gate, graph, memory, program, torch_seams.
"""
