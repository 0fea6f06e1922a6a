"""`OffloadStrategy`: an unchanged LightningModule whose whole step is planned and offloaded.

`strategy.py` has the public class, `planned_strategy.py` the methods that Lightning calls.
These begin and end the steps of a `StrategyRun` (`run.py`).

May import: lightning_seams, offload, offload.estimating, offload.gate, offload.live,
    offload.memory, offload.replaying, offload.running, offload.running.drivers, offload.sizes,
    offload.torch_seams, one_device, sharing, steps.
"""
