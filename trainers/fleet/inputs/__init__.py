"""One input for the jobs that name the same data and augmentation.

`same_input.py` says which loaders are equal, `shared_inputs.py` which jobs of a process read
together. Where devices have processes, `input_service.py` reads for all of them in one more
process, and `input_link.py` is how a device asks it.

May import: dice, loaders, loaders.errors, loaders.identity, loaders.sharing.
"""
