"""Torchdata's tests of a DataLoader, with each one adopted by us where it is iterated.

`run.py` runs them on torch's DataLoader and on ours; `adopting.py` is what the tests import.

May import: loaders.
"""
