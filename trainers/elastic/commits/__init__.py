"""What is committed at each step, and where it comes from: a swarm, a donor, or a log.

May import: elastic.deciding.
"""
