"""Decides which job has which device next, and which job ends. Pure: every file.

`decide.py` takes a state and an event, and gives the next state and commands. `schedule.py` says
whose turn it is and where, `admission.py` who has room, `halving.py` who goes on at a rung.

May import: offload.sizes.
"""
