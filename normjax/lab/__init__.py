"""What `normjax train` runs: a small experiment on real images, to see a normalisation layer at work.

A map: `config` reads TOML into frozen dataclasses, `data` holds the images and their order, `models` the network whose
norm the config names, `train` the steps and the loop, `devices` how several share a step, `runs` the run folder and
its checkpoints, `finished` a run read again, `recalibrate` and `folding` what comes of it, `progress` what is printed,
`plots` the curves. Nothing of the library proper imports this package.
"""

from normjax._extras import require

require("normjax.lab", "lab", "flax", "optax", "orbax", "rich", "matplotlib", "safetensors", "sklearn")
