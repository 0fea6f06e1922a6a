"""The Lightning callbacks that apply the method to a Trainer.

`phase_switch.py` runs phases, `loader_callback.py` carries the state of a loader without phases.

May import: loaders, loaders.adopting, loaders.order, loaders.sharing, loaders.stats, method,
    offload.torch_seams, trainers.elastic.peer, trainers.lightning_seams.
"""
