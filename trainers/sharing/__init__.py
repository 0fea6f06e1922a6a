"""Requests of high priority, which use the device of a training between two nodes of its steps.

May import: loaders.closing, offload, offload.gate, offload.graph, offload.live, offload.plans,
    offload.running, offload.running.drivers, random_state.
"""
