"""The modules and models of benchmarks/module_survey.py, and how each of them is trained.

case.py                what a case is, and the module around a bare model
public_modules.py      Lightning modules in the shape of public ones
*_models.py            tiny models of four libraries
further_*.py           tiny models of many libraries that read values, keep caches, change their way
registry.py            all of them by name
host.py --> fit.py     trains the cases with one version of our code, a process each
outcome.py             what two trainings, plain and ours, say of a case (pure)
"""
