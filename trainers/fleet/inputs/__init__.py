"""One input for jobs with the same data and augmentation.

`same_input.py` compares loaders, and `shared_inputs.py` lets jobs of a process read together. If
devices have processes, `input_service.py` reads for all of them in one more process, and a device
asks it by `input_link.py`.

May import: loaders, loaders.errors, loaders.identity, loaders.sharing, random_state.
"""
