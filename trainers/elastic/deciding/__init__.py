"""What a swarm decides: who has which lanes, what headers mean, when a generation begins.

    view.py      the members of a generation, in their order
    deal.py      the lanes of a step, dealt to them by their speeds
    header.py    what a member says of itself in the middle of a step
    decision.py  what to do next, from the headers of all
    era.py       the lives of a run, and which steps count where one began from a checkpoint
    pace.py      whether a newcomer follows fast enough
    roster.py    the anchor's: who is there, and when a generation begins
    utilisation.py  a prediction for given nodes, before anything runs

Pure: every file.

May import: plain_values.
"""
