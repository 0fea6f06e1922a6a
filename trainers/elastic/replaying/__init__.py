"""The log of a swarm, which a peer writes and a replay reads.

May import: elastic, elastic.commits, elastic.deciding, record_file, plain_values.
"""
