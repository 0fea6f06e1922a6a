"""Swarms of real processes on one machine, and what is done to them: for tests and measurements.

swarm.py      begins an anchor and peers, and ends them
nursery.py    imports once, and forks a process for each peer: half a second instead of seven
peer.py       what a peer trains, and what it writes down
anchor.py     an anchor as a process of its own
faults.py     what happens to a peer at a certain moment of a certain step
network.py    namespaces with slow links between them, which can be cut
ledger.py     who has committed which samples: lost, taken twice, diverged
"""
