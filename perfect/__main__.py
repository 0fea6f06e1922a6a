"""`python -m perfect` lists the commands, a line each."""

import sys

COMMANDS = """\
perfect-train RUN.yaml      trains as a YAML file says: one run, or a grid of runs
perfect-runs ls             lists what has run: where, its state, its accuracy
perfect-compare RUN RUN     shows runs side by side, in the terminal and as a page
perfect-anchor              lets the peers of a swarm meet
perfect-replay RUN          trains a swarm's run again, and compares
perfect-step bisect FILE    finds where a saved training step differs from eager
perfect-card measure        measures this machine, for estimates of steps
python -m loaders.convert   writes a data set as a file that is read without decoding

--help after any of them says more.
"""

if __name__ == "__main__":
    sys.stdout.write(COMMANDS)
