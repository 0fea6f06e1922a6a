"""Runs planned steps for the strategies of Lightning: `offloading`, `elastic` and `fleet` use it.

`plan_request.py` holds the user's options, `target.py` the device, `step_session.py` the steps,
`step_planner.py` makes and runs their plans, `meter.py` counts their time, and `interrupt.py`
delays a Ctrl-C to the end of a step.

May import: offload, offload.gate, offload.graph, offload.live, offload.lowering, offload.measuring,
    offload.memory, offload.plans, offload.program, offload.running, offload.running.drivers,
    offload.sizes.
"""
