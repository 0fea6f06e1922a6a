"""A CPU that behaves like a GPU: streams, events, capture and replay, for tests and smoke runs."""
