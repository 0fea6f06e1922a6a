"""The YAML of a run: its schema, and its strict reader.

`schema.py` has the sections, `fields.py` the kinds of values, `yaml_reader.py` reads a file.

May import: errors, loaders.order, method, offload.sizes.

Nothing here imports torch, so a mistake in a YAML is told at once.
"""
