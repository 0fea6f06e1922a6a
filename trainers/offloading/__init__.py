"""`OffloadStrategy`: an unchanged LightningModule whose whole step is planned and offloaded.

`strategy.py` and `ddp_strategy.py` have the public classes. `live_fit.py` has the methods that
Lightning calls, `live_run.py` what a strategy knows of its run.

May import: lightning_seams, offload, offload.gate, offload.live, offload.memory, offload.plans,
    offload.running, offload.running.drivers, offload.sizes, offload.torch_seams,
    offloading.hardware, one_device, sharing.
"""
