"""The YAML of a run: its schema, and its strict reader.

May import: errors, loaders.order, method, offload.sizes.

Nothing here imports torch, so a mistake in a YAML is reported at once.
"""
