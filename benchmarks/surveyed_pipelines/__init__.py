"""The data pipelines of benchmarks/pipeline_survey.py, and what is checked of each of them.

pipeline_case.py       what a case is: the pipeline as its source writes it, and documented changes
made_up_data.py        tiny files and pictures; nothing is downloaded
*_pipelines.py         pipelines in the shape of public ones
pipeline_registry.py   all of them by name
pipeline_host.py --> pipeline_facts.py   tries one with one version of our code, in its process
pipeline_rows.py       what the attempts say of a pipeline (pure)
"""
