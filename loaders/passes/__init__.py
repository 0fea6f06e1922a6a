"""Which samples a rank serves in each pass, and how their batches are taken in turn.

May import: adopting, arguments, batching, errors, options, order, pipeline, pixels, slots, sources,
stats, streams, torch_seams, workers.
"""
