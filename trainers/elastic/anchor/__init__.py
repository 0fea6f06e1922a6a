"""The anchor: peers meet there. It has no weights, and decides only who is in which generation.

May import: elastic.deciding, elastic.wire, loaders.closing.
"""
