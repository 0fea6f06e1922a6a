"""The anchor: peers meet there. It has no weights, and decides only who is in which generation.

While it is away, training goes on; only changes of membership wait.

May import: elastic.deciding, elastic.wire.
"""
