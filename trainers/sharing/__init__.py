"""Uses the device of a training between two nodes of its steps: answers of high priority.

May import: dice, offload, offload.gate, offload.graph, offload.live, offload.plans,
    offload.running, offload.running.drivers.
"""
