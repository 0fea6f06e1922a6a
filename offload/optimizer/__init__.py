"""The optimizer's update: one task a parameter, with the bits of torch's own step.

May import: errors, graph, program, torch_seams.
"""
