"""The log of a swarm, and commits that are made again from it in one process.

May import: elastic, elastic.commits, elastic.deciding, elastic.reducing, elastic.working,
    json_lines.
"""
