"""Counts of programs compiled for an H200 and a TPU v5e without owning one: ``python -m benchmarks.deviceless``.

They do not depend on the machine that compiles. It wants an environment of its own, with the compilers:

    python3.11 -m venv .venv-deviceless && .venv-deviceless/bin/pip install -e ".[flax]" pytest
    .venv-deviceless/bin/pip install --no-deps -r benchmarks/deviceless/requirements.txt
    .venv-deviceless/bin/python -m benchmarks.deviceless --help
    .venv-deviceless/bin/python -m pytest -m deviceless tests/benchmarks

``programs`` says what is compiled, ``apart`` compiles one program in a process of its own, because a bad program can
hang or crash a compiler, ``targets`` is what that process runs, and ``hlo`` reads the counts off the program's text.
"""
