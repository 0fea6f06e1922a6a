"""The slab where decoded samples wait, and the leaves that a sample is stored as.

May import: blocks, errors, pixels, torch_seams.
"""
