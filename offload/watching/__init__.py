"""Which Python state a traced step reads, whether it has changed since, and what the step does.

    trace --StateReads--> places --frozen--> WatchedState --before every step--> same, or what changed

`holders.py` says where values are, `state_reads.py` finds them, `effects.py` finds what leaves the
process.

May import: errors, program, torch_seams.
"""
