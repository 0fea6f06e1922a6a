"""One loader for several consumers in one process: each sample is decoded once for all of them.

    ReuseLoader -> BatchSource -> kept batches -> SharedView a -> model a
                                               -> SharedView b -> model b

`lockstep` says who takes, who reads on and who waits; it is pure. `shared_stream` does it, and
`shared_view` is what each consumer has as its loader.

May import: arguments, blocks, device, errors, loader, order, pass_position, slots, stats.
"""
