"""The YAML of a run: its schema, and its strict reader.

`schema.py` has the sections, `fields.py` the kinds of values, `yaml_reader.py` reads a file.

May import: errors, loaders.order, method, models, offload.sizes, text.
"""
