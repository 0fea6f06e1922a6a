"""Keeps in a folder what the next start of the same run would measure and search again.

`plan_cache.py` keeps small texts by key, `machine.py` says what a key must say of this machine.

May import: torch_seams.
"""
