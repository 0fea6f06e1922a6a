"""The parts of benchmarks/offload_cpu.py, a file each: planner, overhead, models, orders, workers.

A part measures and returns a `Report` (report.py); the script prints it and writes it down.
"""
