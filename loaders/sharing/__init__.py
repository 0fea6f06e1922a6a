"""One loader for several consumers of one machine: each sample is decoded once for all of them.

    ReuseLoader -> BatchSource -> kept batches -> LocalView a -> model a
                                               -> LocalView b -> model b
                                               -> LocalView c -> shared memory -> RemoteView c

`lockstep` says who takes, who reads on and who waits; it is pure. `shared_stream` does it, over its
`kept_batches`. `shared_view` is what each consumer has as its loader, `local_view` in the process
of the stream. For another process `view_server` has a thread that drives a local one; `lent_blocks`
carry its batches, `view_link` the words, and `remote_view` is the loader there, which a
`RemoteSource` reads.

May import: arguments, batching, blocks, closing, errors, loader, order, slots, stats, workers.
"""
