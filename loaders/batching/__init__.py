"""From the slots of a batch to the batch, on the consumer's device.

`batches` makes a batch; `serve_views` and `user_views` make what a serve shows of a sample, by our
augmentations or by a user's own code; `joint_parts` finds what is moved with the picture; `device`
sends the batch ahead.

May import: adopting, blocks, errors, pixels, slots, sources, stats, workers.
"""
