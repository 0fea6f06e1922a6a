"""Which public modules are planned with nothing but `strategy=` added (`python -m
benchmarks.surveyed`): a table of constructors a file, and how one of them is trained."""
