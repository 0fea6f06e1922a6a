"""What every benchmark shares: options, rounds, child processes, the machine, the result files.

command.py   a claim's module, its options -> measured -> results/DATE_SUITE_cpu_PART.{md,json}
rounds.py    what is compared runs in turns, in another order each round
process.py   a fresh process; the memory of a call
report.py    tables and targets -> Markdown and JSON
machine.py   commit, versions and machine of a result
foreign_tests.py  another project's tests with and without us
"""
