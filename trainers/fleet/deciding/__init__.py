"""Decides which job has which device next, and which job ends. Pure: every file.

May import: offload.sizes.
"""
