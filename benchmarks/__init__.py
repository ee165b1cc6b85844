"""Measurements whose results stand in the README.

  python -m benchmarks             the timing suite: normjax against other libraries and a copy of the same bytes
  python -m benchmarks.accuracy    how far each library is from float64 on hard inputs
  python -m benchmarks.compiling   seconds to trace and compile the gradient of 50 norms in a row
  python -m benchmarks.deviceless  what programs for an H200 and a TPU v5e move, compiled without either

The rooms:
  __main__.py     the command line, and how it is measured
  arguments.py    what the command lines share
  cases.py        what is timed, as data
  problems.py     a case's arrays, the reference's answer, the bound on errors
  contestants.py  who is timed; peers/ has a module for each other library
  timing.py       interleaved rounds, and equal allocation
  worker.py       one measuring process: checks, times, writes lines
  imports.py      the import time
  results.py      from lines to paired ratios
  render.py       table and plot
  results/        the table and the plot that the README shows
  accuracy.py     the table of errors: stress.py has its inputs, golden/ what PyTorch answers, and the script for that
  compiling.py    the seconds of compiling
  deviceless/     the counts
"""
