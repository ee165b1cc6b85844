# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · Axes: which cells share a mean
#
# **Question.** Batch, layer, instance, group, RMS and ghost-batch norm have one formula,
# $y = \gamma\,(x-\mu)/\sqrt{v+\varepsilon} + \beta$. What, then, tells them apart?
#
# **Prediction.** Only the *set of entries that share $\mu$ and $v$*, which `layout` and `axis_names` spell out.
# So if one entry is nudged, the outputs that move are exactly the entries of its group. Two spellings with the same
# groups are the same layer: un-synchronised devices are ghost batches, and synchronised devices are one batch.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import normjax as nj

plt.rcParams.update({"figure.dpi": 90, "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito: safe for the colour-blind

# %% [markdown]
# **Experiment.** Four examples with four channels at four positions: 64 cells. Each line below is one spelling.
# The last two hold two examples on each of two devices; `vmap` with an axis name stands in for the devices, and that
# name is either pooled (synchronised) or not.

# %%
N, C, L = 4, 4, 4
x = jnp.asarray(np.random.default_rng(0).normal(size=(N, C, L)), jnp.float32)

batch_norm = functools.partial(nj.batch_norm, train=True)
spellings = {
    "batch": (batch_norm, "N C L", "N L", None),
    "layer": (nj.layer_norm, "N C L", "C L", None),
    "ghost batches of 2": (batch_norm, "N=(B n=2) C L", "n L", None),
    "RMS, at each position": (nj.rms_norm, "N C L", "C", None),
    "batch, 2 devices, not synchronised": (batch_norm, "N C L", "N L", "data"),
    "group, 2 blocks of channels": (nj.group_norm, "N C=(G=2 K) L", "K L", None),
    "batch, 2 devices, synchronised": (batch_norm, "N C L", "N L data", "data"),
    "instance": (nj.instance_norm, "N C L", "L", None),
}


def on_devices(call, mapped):
    """`call`, or the same with the examples dealt out to two devices."""
    if mapped is None:
        return call
    return lambda x: jax.vmap(call, axis_name=mapped)(x.reshape(2, N // 2, C, L))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def nudge_every_cell(norm, layout, axis_names, mapped):
    """How far every output (column) moves when each cell in turn (row) is nudged; also how many entries a mean has."""
    layer = on_devices(lambda x: norm(x, layout=layout, axis_names=axis_names)[0], mapped)
    nudges = 0.5 * jnp.eye(x.size).reshape(x.size, N, C, L)
    change = jax.vmap(lambda nudge: layer(x + nudge) - layer(x))(nudges).reshape(x.size, x.size)
    pool = on_devices(lambda x: nj.moments(x, layout=layout, axis_names=axis_names).count, mapped)
    return change, pool(x)


def group_numbers(change):
    """The number of each cell's group: cells belong together where the same nudges move them."""
    first_that_moves_it = (np.abs(change) > 1e-4).argmax(axis=0)
    return np.unique(first_that_moves_it, return_inverse=True)[1].reshape(N, C, L)


groups, counts = {}, {}
for title, spelling in spellings.items():
    change, counts[title] = nudge_every_cell(*spelling)
    groups[title] = group_numbers(change)

# %% [markdown]
# **Picture.** A row is an example, a block of four columns is a channel, a column within it is a position. Cells
# with the same number and colour share a mean (for RMS: a mean square). The group of the first cell is outlined.


# %%
def draw(axes, title, group, layout, axis_names, mapped):
    rows = group.reshape(N, C * L)
    axes.pcolormesh(rows, cmap="cividis", vmin=0, vmax=max(rows.max(), 1), edgecolors="white", linewidth=0.5)
    for (row, column), number in np.ndenumerate(rows):
        dark = number < 0.5 * max(rows.max(), 1)
        at = (column + 0.5, row + 0.5)
        axes.text(*at, number, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        if number == rows[0, 0]:
            inset = plt.Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, fill=False, edgecolor=ORANGE, linewidth=2)
            axes.add_patch(inset)
    for border in range(L, C * L, L):
        axes.axvline(border, color="black", linewidth=1.5)
    if mapped:
        axes.axhline(N // 2, color="black", linewidth=1.5, linestyle="--")
        for device in range(2):
            axes.text(C * L + 0.3, device * N // 2 + 1, f"device {device}", rotation=270, va="center", fontsize=8)
    axes.set_xticks([L * c + L / 2 for c in range(C)], [f"channel {c}" for c in range(C)])
    axes.set_yticks(np.arange(N) + 0.5, range(N))
    axes.tick_params(length=0)
    axes.set_ylabel("example")
    axes.invert_yaxis()
    axes.set_title(f'{title}\nlayout="{layout}", axis_names="{axis_names}"', fontsize=9)


figure, panels = plt.subplots(4, 2, figsize=(10.5, 9), layout="constrained")
for panel, (title, (_, layout, axis_names, mapped)) in zip(panels.flat, spellings.items(), strict=True):
    draw(panel, title, groups[title], layout, axis_names, mapped)
plt.show()

# %% [markdown]
# **Meaning.** The left column pools over examples, so its layers couple them; the right column never leaves an example.
# Nothing in the picture depends on the layer's name: it is read off the outputs, and follows the two strings.
#
# ## A spectrum: per channel, or per channel and position?
#
# **Question.** A batch of 1-D spectra has shape `(N, C, L)`. Batch norm can pool over examples and positions (`"N L"`:
# one mean per channel), or over examples alone (`"N"`: one per channel *and position*, which is also what happens when
# a spectrum is handed over as a flat vector of features). Both run. Which one is meant?
#
# **Prediction.** Per position has $L$ times fewer entries in each mean and $L$ times the parameters, ties the layer to
# one length, and removes the average spectrum: a line that all examples share is gone.

# %%
readings = {"per channel": "N L", "per channel and position": "N"}
shape = (16, 2, 128)
for title, axis_names in readings.items():
    print(f"--- {title}\n{nj.describe(shape, layout='N C L', axis_names=axis_names)}\n")

# %% [markdown]
# **Experiment.** Sixteen spectra on two detectors with different gain. Every spectrum has the same line at position 40
# (a solvent, say); a second line at position 90 differs in height from one example to the next.

# %%
rng = np.random.default_rng(1)
position = np.arange(shape[2])


def spectra(examples):
    line = lambda centre, width: np.exp(-0.5 * ((position - centre) / width) ** 2)  # noqa: E731
    heights = rng.uniform(0.2, 2.0, size=(examples, 1, 1))
    gain = np.array([1.0, 5.0]).reshape(1, 2, 1)
    noise = rng.normal(scale=0.05, size=(examples, *shape[1:]))
    return np.float32(gain * (3 * line(40, 4) + heights * line(90, 6) + noise))


signal = spectra(shape[0])
normalize = jax.jit(nj.normalize, static_argnames=("layout", "axis_names"))
normalised, pooled = {}, {}
for title, axis_names in readings.items():
    normalised[title], pooled[title] = normalize(signal, layout="N C L", axis_names=axis_names)

figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.2), layout="constrained")
panels[0].set(title="input, detector 1", ylabel="signal (arbitrary units)")
for panel, values in zip(panels, [signal, *normalised.values()], strict=True):
    values = np.asarray(values)
    for example in (0, 1, 2):
        panel.plot(
            position, values[example, 1], color=BLUE, linewidth=0.8, label="three examples" if not example else None
        )
    panel.plot(
        position, values[:, 1].mean(axis=0), color=ORANGE, linewidth=2.2, linestyle="--", label="mean of 16 examples"
    )
    panel.set_xlabel("position (index)")
for panel, title in zip(panels[1:], readings, strict=True):
    panel.set(title=title, ylabel="normalised (standard deviations)")
panels[0].legend(frameon=False, fontsize=8.5, handlelength=1.2)
plt.show()

# %%
print(f"{'':<26}{'m':>6}{'running numbers':>18}{'parameters':>12}")
for title, statistics in pooled.items():
    size = statistics.mean.size
    print(f"{title:<26}{int(statistics.count.max()):>6}{2 * size:>18}{2 * size:>12}")

print("\nA longer spectrum, with the parameters of the shorter one:")
longer = np.zeros((16, 2, 160), "float32")
kept = {"per channel": nj.Affine.init(C=2), "per channel and position": nj.Affine.init(C=2, L=128)}
for title, axis_names in readings.items():
    try:
        jax.eval_shape(functools.partial(batch_norm, layout="N C L", axis_names=axis_names), longer, kept[title])
        print(f"{title}: runs")
    except ValueError as error:
        print(f"{title}: {error}")

print("\nA batch of one spectrum, largest |output|:")
alone = {}
for title, axis_names in readings.items():
    alone[title], _ = normalize(signal[:1], layout="N C L", axis_names=axis_names)
    print(f"{title}: {np.abs(alone[title]).max():.2f}")

# %% [markdown]
# **Meaning.** Per channel keeps the shape of the spectrum and only takes out gain and offset. Per channel and position
# flattens the average spectrum to zero, blows the noise between the lines up to the size of the signal, takes no other
# length, and has nothing left of a single example. Where every position is a different quantity (a table of
# features), that is what one wants; on a signal it is usually a mistake, and only `axis_names` says which was made.


# %%
def partition(labels):
    """The set of groups, each a set of cells: what labels say apart from their numbers."""
    return {frozenset(np.flatnonzero(labels == label)) for label in np.unique(labels)}


# The nudged groups agree with the library's own pooling in number and size, and with each other where predicted.
for title, (_, _, axis_names, _) in spellings.items():
    count = np.asarray(counts[title])
    count = count[0] if "data" in axis_names else count  # a synchronised mean is the same on both devices
    sizes = np.bincount(groups[title].ravel())
    assert sizes.size == count.size, title
    assert (sizes == count.flat[0]).all(), title
assert partition(groups["batch"]) == partition(groups["batch, 2 devices, synchronised"])
assert partition(groups["ghost batches of 2"]) == partition(groups["batch, 2 devices, not synchronised"])
assert len({frozenset(partition(group)) for group in groups.values()}) == len(groups) - 2

# Per position erases what the examples share, and a single example; per channel does neither.
mean_spectrum = {title: np.abs(np.asarray(values).mean(axis=0)).max() for title, values in normalised.items()}
assert mean_spectrum["per channel and position"] < 1e-5 < 1 < mean_spectrum["per channel"]
assert np.abs(alone["per channel and position"]).max() == 0 < 1 < np.abs(alone["per channel"]).max()
