"""Who runs steps, on what: Lightning strategies over `offload` and `loaders`.

Empty so far: `OffloadStrategy` comes with the offload engine. The package exists from the first
release, because an editable install fixes its list of top-level packages when it is made.
"""
