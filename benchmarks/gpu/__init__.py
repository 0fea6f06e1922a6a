"""The GPU suite: seven parts, each a module, each within nine minutes on one GPU.

    run.sh PART -> __main__.py -> steps, each a process (child.py) -> OUT/gpu_PART.jsonl
                                                  -> OUT/DATE_gpu_PART.{md,json}

A cell is one measured row. It is written down as soon as it is there, so a run that was cut short
goes on where it stopped; one that fails is written down with its error, and the next one goes on.
"""
