"""Makes a `Plan` from a TaskGraph and a budget, and shows it in words and as a picture.

May import: caching, errors, graph, lowering, memory, planning, program, sizes.
"""
