"""How long `import normjax` takes, in fresh processes that have just imported JAX."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROCESSES = 7  # a second each, whatever the suite's number: that of a quick run would say nothing

# In one process: a difference of two processes would carry the noise of JAX's own second.
CODE = """
import json, time
start = time.perf_counter()
import jax
between = time.perf_counter()
import normjax
print(json.dumps({"jax_s": between - start, "normjax_s": time.perf_counter() - between}))
"""


def import_times() -> Iterator[dict[str, Any]]:
    """A record for each of `PROCESSES`, after one that leaves the byte code behind, as an installation does."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    for process in range(-1, PROCESSES):
        ran = subprocess.run(
            [sys.executable, "-c", CODE], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        if process >= 0:
            yield {"kind": "import", "process": process, **json.loads(ran.stdout)}
