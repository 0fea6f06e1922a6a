"""A step, and its plan, for a card that is not here.

May import: errors, graph, lowering, memory, planning, plans.
"""
