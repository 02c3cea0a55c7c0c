"""Which configuration each kernel runs with, by measurement on the device that will run it.

`choices` (in choices.py) is the entrance: kernels of a plan that nobody has measured yet compete,
each among candidates (candidates.py), as plain data (recipes.py) that worker processes (worker.py,
workers.py) compile in parallel and launch one after the other; winners are kept in one file
(records.py).
"""
