"""What a run or a comparison of runs looks like: one HTML file, no script, nothing fetched.

    metrics.csv -> metrics  |  run.json -> results  -> words, page, panels, story, plots -> report
                                                    -> measures, curves        -> perfect.compare

Nothing here imports torch or Lightning: a report can be made where a run could not.
"""

from perfect.report.report import write_report

__all__ = ["write_report"]
