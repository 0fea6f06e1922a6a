"""step -> TaskGraph -> Plan (MemGraph) -> Executor. Imports none of our other packages.

Empty so far: the engine comes with its own issue. The package exists from the first release,
because an editable install fixes its list of top-level packages when it is made.
"""
