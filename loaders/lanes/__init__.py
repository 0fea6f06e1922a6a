"""One loader's data for virtual ranks ("lanes"): whoever is there serves any of them.

    order of a pass --shared out, nothing twice--> lane 0: its own reuse order, step by step
                                                   lane 1: its own reuse order, step by step

May import: arguments, batching, closing, errors, loader, order, pipeline, slots, stats, workers.
"""
