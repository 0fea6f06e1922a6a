"""How others train many jobs on one device: what a fleet is compared with.

gpt_jobs (the same jobs for everybody) -> ray_tune (one trial after the other, each by itself)
tree_memory: what a process and all that it has started take of the machine
"""
