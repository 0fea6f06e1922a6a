"""What a captured task calls: torch kernels whose tensors are named by buffer.

May import: errors, graph, torch_seams.
"""
