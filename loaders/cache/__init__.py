"""The decoded cache, in RAM or on disk: its files, their index, their records.

May import: adopting, closing, errors, identity, pixels, slots, sources.
"""
