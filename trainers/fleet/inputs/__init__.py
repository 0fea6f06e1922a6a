"""One input for the jobs of a process that name the same data and augmentation.

`same_input.py` says which loaders are equal, `shared_inputs.py` which jobs read together.

May import: dice, loaders, loaders.errors, loaders.identity, loaders.sharing.
"""
