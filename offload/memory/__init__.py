"""Real memory: arenas, the user's tensors in them, what a machine has left, and how kernels write
at planned addresses.

May import: errors, graph, program, sizes, torch_seams.
"""
