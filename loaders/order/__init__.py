"""Which samples are served when, and how often. Pure: every file.

May import: nothing of ours.
"""
