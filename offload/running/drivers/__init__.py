"""Drivers of the streams and events of devices. It knows nothing of nodes.

May import: errors, sizes.
"""
