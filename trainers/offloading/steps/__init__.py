"""The graphs of a run, one per situation: how they are planned, run and checked.

`step_graphs.py` has those of training, `evaluation.py` those of validation, test and prediction.
`answers.py` has what is known of values that a step asks for.

May import: lightning_seams, offload, offload.graph, offload.lowering, offload.measuring,
    offload.optimizer, offload.planning, offload.plans, offload.program, offload.running,
    offload.sizes, offload.torch_seams, offload.tracing, offload.watching, offloading.hardware,
    offloading.observers, offloading.tracing.
"""
