"""Which samples a rank serves in each pass, and how their batches are taken in turn.

`rank_order`, `stream_order` and `own_batches` have the order of a data set, of a stream, and of a
DataLoader that makes whole batches. `pass_run` serves a pass with reuse, `torch_pass` one without.

May import: adopting, arguments, batching, errors, options, order, pipeline, pixels, slots, sources,
stats, streams, torch_seams, workers.
"""
