"""Runs planned steps for the strategies of Lightning: `offloading`, `elastic` and `fleet` use it.

`plan_request.py` holds the user's options, `target.py` the device, `step_session.py` the steps,
`step_planner.py` makes and runs their plans, and `meter.py` counts their time.

May import: offload, offload.gate, offload.graph, offload.live, offload.measuring, offload.memory,
    offload.plans, offload.program, offload.running, offload.running.drivers, offload.sizes.
"""
