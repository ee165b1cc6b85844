"""What an installed wheel must do where jax is the only dependency: .ci/run feeds this to that environment."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import normjax as nj

package = Path(nj.__file__).parent
assert package.parent.name == "site-packages", package
for name in ("py.typed", "lab/presets/digits.toml"):
    assert (package / name).is_file(), f"the wheel lacks {name}"
assert not any(importlib.util.find_spec(name) for name in ("flax", "optax", "rich", "matplotlib"))

y, state = nj.batch_norm([[1.0], [3.0]], None, nj.BatchStats.init(C=1), layout="N C", axis_names="N", train=True)
assert y.shape == (2, 1)
assert int(state.count) == 1
print("core:", nj.__version__, y.tolist())

for part, extra in [("normjax.lab", "lab"), ("normjax.linen", "flax"), ("normjax.nnx", "flax")]:
    words = None
    try:
        __import__(part)
    except ModuleNotFoundError as error:
        words = str(error)
    assert words is not None, f"{part} was imported without its extra"
    assert f'pip install "normjax[{extra}]"' in words, words
    print(words)

program = subprocess.run([sys.executable, "-m", "normjax", "train", "digits"], capture_output=True, text=True)
assert program.returncode == 2, program
assert 'pip install "normjax[lab]"' in program.stderr, program.stderr
assert len(program.stderr.splitlines()) == 1, program.stderr
print("program:", program.stderr.strip())

program = subprocess.run([sys.executable, "-m", "normjax", "check"], capture_output=True, text=True)
print(program.stdout, program.stderr)
assert program.returncode == 0, program
