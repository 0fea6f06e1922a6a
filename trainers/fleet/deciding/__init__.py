"""Decides which job has which device next, and which job ends. Pure: every file.

`decide.py` takes a state and an event, and returns the next state and commands. `schedule.py` says
which job has a turn and where, `admission.py` which has room, `halving.py` which goes on at a rung.

May import: offload.sizes.
"""
