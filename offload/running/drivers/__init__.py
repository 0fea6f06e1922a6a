"""Drivers of the streams and events of one device. It knows nothing of nodes.

May import: errors.
"""
