"""Drivers of the streams and events of one device. `driver.py` says what a driver can do.

May import: errors, torch_seams.
"""
