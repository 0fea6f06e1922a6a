"""A step whose Python runs every time, on shadows, while a plan of its tape runs the kernels.

May import: caching, errors, graph, lowering, measuring, memory, planning, plans, program,
running, sizes, torch_seams.
"""
