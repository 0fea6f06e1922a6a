"""What a peer computes: the gradients of its lanes, added up on the host.

May import: elastic, elastic.deciding, loaders.lanes, loaders.stats, torch_seams.
"""
