"""The jobs of one device: in this process, or in a process of their own.

May import: fleet.deciding, fleet.inputs, fleet.jobs, loaders.closing, loaders.sharing,
    random_state.
"""
