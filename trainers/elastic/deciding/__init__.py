"""What a swarm decides: who has which lanes, what headers mean, when a generation begins.

Pure: every file.

May import: plain_values.
"""
