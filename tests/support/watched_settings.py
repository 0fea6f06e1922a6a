"""A module of settings that a step reads."""

BETA = 0.5
