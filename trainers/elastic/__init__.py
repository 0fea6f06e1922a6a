"""Training over nodes that come, go and die, with one global batch.

May import: nothing of ours.
"""
