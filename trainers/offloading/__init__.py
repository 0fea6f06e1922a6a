"""`OffloadStrategy`: an unchanged LightningModule whose whole step is planned and offloaded.

`strategy.py` and `ddp_strategy.py` have the public classes. `planned_fit.py` has the methods that
Lightning calls, `planned_steps.py` what these methods do. The files `live_*.py` are on the way to
take their place (docs/decisions/0041).

May import: lightning_seams, offload, offload.gate, offload.live, offload.memory, offload.plans,
    offload.running, offload.running.drivers, offload.sizes, offload.torch_seams, offload.tracing,
    offloading.hardware, offloading.steps, offloading.tracing, one_device, sharing.
"""
