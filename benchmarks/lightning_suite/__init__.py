"""Lightning's own tests, with our strategy in every Trainer that names none.

`run.py` runs them with and without the strategy; `inject.py` is the pytest plugin.

May import: trainers.
"""
