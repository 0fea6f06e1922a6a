"""The registered accuracy tables: data -> recipes -> train (one run) -> evidence (the tables)."""
