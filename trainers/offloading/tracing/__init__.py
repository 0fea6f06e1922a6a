"""What of a module's step is traced, what is watched, and what is done for real after it.

May import: lightning_seams, offload, offload.optimizer, offload.program, offload.torch_seams,
    offload.tracing, offload.watching.
"""
