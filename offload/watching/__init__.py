"""Which Python state a traced step reads, whether it has changed since, and what the step does.

    trace --StateReads--> places --frozen--> WatchedState --before every step--> same, or changes

`holders.py` says where values are, `state_reads.py` finds them, `watched_state.py` compares them,
`effects.py` finds what a step does outside of the process.

May import: errors, gate, program, torch_seams.
"""
