"""Steps of GPT-3 in a peer of an elastic run, on paper (`benchmarks/elastic_simulated.py`)."""
