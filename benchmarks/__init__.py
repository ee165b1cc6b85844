"""Measurements whose results stand in the README.

  python -m benchmarks            the timing suite: normjax against other libraries and a copy of the same bytes
  python -m benchmarks.accuracy   how far each library is from float64 on hard inputs

The rooms of the suite:
  __main__.py     the command line, and how it is measured
  cases.py        what is timed, as data
  problems.py     a case's arrays, the reference's answer, the bound on errors
  contestants.py  who is timed; peers/ has a module for each other library
  timing.py       interleaved rounds, and equal allocation
  worker.py       one measuring process: checks, times, writes lines
  imports.py      the import time
  results.py      from lines to paired ratios
  render.py       table and plot
"""
