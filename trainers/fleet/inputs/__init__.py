"""One input for jobs with the same data and augmentation.

May import: loaders, loaders.errors, loaders.identity, loaders.sharing, random_state.
"""
