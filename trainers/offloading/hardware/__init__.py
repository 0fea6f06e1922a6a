"""The device of a run: its engine and rates, its random generators, and how long steps took.

`target.py` says where steps run, `devices.py` moves tensors, `meter.py` counts seconds.

May import: lightning_seams, offload, offload.gate, offload.graph, offload.measuring,
    offload.memory, offload.program, offload.running, offload.running.drivers, offload.sizes,
    offload.torch_seams.
"""
