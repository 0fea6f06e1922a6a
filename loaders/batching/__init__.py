"""From the slots of a batch to the batch, on the consumer's device.

May import: adopting, blocks, errors, pixels, slots, sources, stats, workers.
"""
