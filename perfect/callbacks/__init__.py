"""The Lightning callbacks that apply the method to a Trainer.

May import: loaders, loaders.adopting, loaders.order, loaders.sharing, loaders.stats, method,
    offload.torch_seams, trainers.elastic.peer, trainers.lightning_seams.
"""
