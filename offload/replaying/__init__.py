"""A step as a file: saved, run again in another process, and searched for where its bits go wrong.

May import: errors, graph, live, memory, plans, program, running, running.engines, sizes,
torch_seams.
"""
