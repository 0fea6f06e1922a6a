"""The decoded cache, in RAM or on disk: its files, their index, their records.

May import: adopting, errors, identity, pixels, slots, sources.
"""
