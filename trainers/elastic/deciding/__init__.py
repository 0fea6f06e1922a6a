"""What a swarm decides: who has which lanes, what headers mean, when a generation begins.

    view.py      the members of a generation, in their order
    deal.py      the lanes of a step, dealt to them by their speeds
    lane_rate.py  how many lanes a second a member says that it computes
    header.py    what a member says of itself in the middle of a step
    peer_figures.py  what people are told of the members
    decision.py  what to do next, from the headers of all
    era.py       the lives of a run, and which steps count where one began from a checkpoint
    pace.py      whether a newcomer follows fast enough
    group_size.py  how many lanes of a peer run as one graph
    roster.py    the anchor's: who is there, and when a generation begins
    utilisation.py  a prediction for given nodes, before anything runs

Pure: every file.

May import: plain_values.
"""
