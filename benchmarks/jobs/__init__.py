"""Small jobs of a fleet, and a guest that takes memory, for benchmarks and tests."""
