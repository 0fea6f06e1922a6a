"""Code of others that may read weights or gradients between two steps, so that nothing is deferred.

May import: lightning_seams, offloading.tracing.
"""
