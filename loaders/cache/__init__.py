"""The decoded cache, in RAM or on disk: its files, their index, their records.

May import: adopting, checks, errors, identity, pixels, slots, sources.
"""
