"""What `elastic_cpu.py` measures, a part a file."""
