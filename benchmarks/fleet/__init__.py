"""What `fleet_cpu.py` measures, a part a file."""
