"""A step, and its plans, for a card that is not here: nothing that has bytes is made.

May import: errors, graph, live, lowering, memory, planning, plans, program, torch_seams.
"""
