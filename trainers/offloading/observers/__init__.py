"""Code of others that may read weights or gradients between two steps, so that nothing is deferred.

`onlookers.py` is about micro-batches, `weight_readers.py` about late updates.
`flushing_callback.py` runs late updates before other callbacks read the weights.

May import: lightning_seams, offloading.tracing.
"""
