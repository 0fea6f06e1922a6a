"""A step, and its plans, for a card that is not here: nothing that has bytes is made.

May import: errors, graph, live, lowering, measuring, memory,
    planning, plans, program, sizes, torch_seams.
"""
