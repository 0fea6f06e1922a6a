"""What `sharing_cpu.py` measures, a part a file."""
