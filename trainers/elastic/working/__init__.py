"""What a peer computes: the gradients of its lanes, added up on the host.

May import: elastic, elastic.commits, elastic.deciding, elastic.reducing, loaders.lanes.
"""
