"""One loader's data for virtual ranks ("lanes"): whoever is there serves any of them.

    order of a pass --shared out, nothing twice--> lane 0: its own reuse order, step by step
                                                   lane 1: its own reuse order, step by step

`lane_order` says what a lane serves at a step; it is pure. `held_lanes` has what is decoded of a
lane; `lane_table` says which lanes come, go and stay. `lane_crew` has the threads. `lane_loader` is
what a training loop uses.

May import: arguments, batching, closing, errors, loader, order, pipeline, slots, stats, workers.
"""
