"""What `perfect_accuracy.py` is made of: data, nets, runs, the training loop, the report.

data -> recipes -> pilot, gpu (what is tried) -> bench, train (one run) -> report
"""
