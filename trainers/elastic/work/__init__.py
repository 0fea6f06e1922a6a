"""What a peer computes: its lanes' gradients, added up on the host, and the update by a commit.

May import: elastic, elastic.deciding, loaders.lanes, offload, offload.graph, offload.live,
    offload.torch_seams, steps.
"""
