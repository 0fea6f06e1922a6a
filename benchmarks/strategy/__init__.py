"""The parts of benchmarks/strategy_cpu.py, a file each: overhead, gpt2, plan, matrix.

A part measures and returns a `Report` (offloading/report.py); the script writes it down.
"""
