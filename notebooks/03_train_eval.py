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
# # 3 · Training and evaluation: two functions behind one name
#
# In training, batch norm normalises by the batch at hand and moves running statistics a little towards it,
# $r \leftarrow r + \frac{a}{w'}\,(\text{batch} - r)$. In evaluation it normalises by $r$ alone.
#
# **Question.** How long until the running statistics can be trusted, and what does the choice of average change?
#
# **Prediction.** They start at mean 0 and variance 1. A plain average with new weight $\alpha$ still holds
# $(1-\alpha)^t$ of that start after $t$ updates: for $\alpha = 0.01$ and $t = 100$ this is 37 %. A large $\alpha$
# forgets the start soon but keeps following single batches. Debiased and cumulative averages drop the start at the
# first update. And since a batch variance divides by $m$, its average settles at $(m-1)/m$ of the true one, unless
# `unbiased=True` stores $m/(m-1)$ times it.

# %%
import functools

import jax
import matplotlib.pyplot as plt
import numpy as np

import normjax as nj

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"  # Okabe and Ito

# %% [markdown]
# ## Warming up
#
# **Experiment.** A thousand batches of 32 entries, drawn from mean 3 and variance 4. Six ways to average them.

# %%
STEPS, M, MEAN, VAR = 1000, 32, 3.0, 4.0
stream = np.random.default_rng(0).normal(MEAN, np.sqrt(VAR), size=(STEPS, M)).astype("float32")
probe = np.random.default_rng(1).normal(MEAN, np.sqrt(VAR), size=16384).astype("float32")

averages = {
    "Ema(0.5)": nj.Ema(0.5),
    "Ema(0.1)": nj.Ema(0.1),
    "Ema(0.01)": nj.Ema(0.01),
    "Ema(0.01, debias=True)": nj.Ema(0.01, debias=True),
    "Cumulative()": nj.Cumulative(),
    "Cumulative(unbiased=True)": nj.Cumulative(unbiased=True),
}


@functools.partial(jax.jit, static_argnames="running")
def warm_up(stream, running):
    """The running statistics after every update, and how far evaluation is from training on the probe."""
    norm = functools.partial(nj.batch_norm, layout="N", axis_names="N", running=running)
    as_trained, _ = norm(probe, train=True)

    def step(state, batch):
        _, state = norm(batch, state=state, train=True)
        evaluated, _ = norm(probe, state=state, train=False)
        gap = ((evaluated - as_trained) ** 2).mean() ** 0.5
        return state, (state.mean, state.var, gap)

    return jax.lax.scan(step, nj.BatchStats.init(), stream)


history, last = {}, {}
for name, running in averages.items():
    last[name], curves = warm_up(stream, running)
    history[name] = [np.asarray(curve) for curve in curves]

# %% [markdown]
# **Picture.** The third panel is the train–eval gap: the root mean square difference between the two modes' outputs on
# 16 384 fresh entries, averaged between the points shown. Its unit is one standard deviation of the output.

# %%
figure, panels = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
styles = [(PINK, "-", 1), (BLUE, "-", 1.2), (ORANGE, "-", 1.8), (GREEN, "-", 4.5), (SKY, "-", 2), ("black", "--", 1.2)]
shown = np.unique(np.geomspace(1, STEPS, 80).astype(int))  # updates, evenly on a log scale
for (name, curves), (colour, dashes, width) in zip(history.items(), styles, strict=True):
    mean, var, gap = curves
    gap = np.add.reduceat(gap, np.append(0, shown[:-1])) / np.diff(shown, prepend=0)
    for panel, curve in zip(panels, [mean[shown - 1], var[shown - 1], gap], strict=True):
        panel.plot(shown, curve, color=colour, linestyle=dashes, linewidth=width, label=name)
for panel, true, name in zip(panels, [MEAN, VAR], ["running mean", "running variance"], strict=False):
    panel.axhline(true, color="grey", linewidth=3, alpha=0.4, zorder=0, label="true value")
    panel.set(xscale="log", ylabel=f"{name} (unit of x{'²' if true == VAR else ''})")
panels[2].set(xscale="log", yscale="log", ylabel="train–eval gap (standard deviations)")
for panel in panels:
    panel.set_xlabel("updates")
figure.legend(
    *panels[0].get_legend_handles_labels(),
    loc="outside upper center",
    ncols=7,
    fontsize=9,
    columnspacing=1.2,
    frameon=False,
)
plt.show()

print(f"{'':<28}{'running mean after 100':>24}{'predicted':>11}{'variance at the end':>21}{'gap at the end':>16}")
for name, running in averages.items():
    start_left = (1 - running.new_weight) ** 100 if isinstance(running, nj.Ema) and not running.debias else 0.0
    mean, var, gap = history[name]
    print(f"{name:<28}{mean[99]:>24.2f}{MEAN * (1 - start_left):>11.2f}", end="")
    print(f"{var[-200:].mean():>21.2f}{gap[-200:].mean():>16.3f}")
print(f"(m-1)/m of the true variance: {VAR * (M - 1) / M:.2f}; at the end: mean over the last 200 updates")

# %% [markdown]
# **Meaning.** The gap has three sources. The start, until it has worn off. The last few batches, which the average
# follows however long it runs: Ema(0.5) is stuck there. And the divisor $m$ of the stored variance. A debiased or
# cumulative average avoids the first, a small weight the second, `unbiased=True` the third; with all three the gap is
# smallest. (That is on a stream that stands still.)
#
# ## The classic mode bug
#
# **Question.** A classifier that trains well fails when deployed. What if evaluation is run in the wrong mode, or with
# a state that training threw away?
#
# **Prediction.** With batch statistics the answer for one example depends on its batch-mates: noise of order
# $1/\sqrt m$, and a batch of one gives $\beta$ (here 0) whatever the input. With a state that was never updated
# the layer does not normalise at all. Neither raises an error.
#
# **Experiment, one.** One and the same entry, $x = 5$, in 300 random batches of each size.

# %%
state = last["Ema(0.01, debias=True)"]
sizes = [1, 2, 4, 8, 16, 32, 64, 128]
X = 5.0


@functools.partial(jax.jit, static_argnames="use_batch_stats")
def evaluate_among(mates, size, *, use_batch_stats):
    """The output for x = 5 as the first of each batch: of a row of mates, the first `size`."""
    norm = functools.partial(nj.batch_norm, layout="N", axis_names="N", train=False, use_batch_stats=use_batch_stats)
    counted = np.arange(mates.shape[1]) < size
    return jax.vmap(lambda batch: norm(batch.at[0].set(X), state=state, where=counted)[0][0])(mates)


rng = np.random.default_rng(2)
outputs = {False: [], True: []}
for size in sizes:
    mates = rng.normal(MEAN, np.sqrt(VAR), size=(300, sizes[-1])).astype("float32")
    for use_batch_stats, rows in outputs.items():
        rows.append(np.asarray(evaluate_among(mates, size, use_batch_stats=use_batch_stats)))

# %% [markdown]
# **Experiment, two.** Two classes that differ by the sign of $x - 3$, and the classifier "normalise, then ask whether
# the output is positive". 2048 labelled entries, fed in three ways: mixed batches of 32, batches of 32 that hold one
# class each (as from a sorted file), and one at a time.

# %%
labels = rng.permutation(2048) % 2
entries = (MEAN + np.where(labels == 1, 1.9, -1.9) + rng.normal(0, 0.7, size=2048)).astype("float32")
by_class = np.argsort(labels, kind="stable")
feeds = {
    "mixed batches": (entries.reshape(-1, 32), labels.reshape(-1, 32)),
    "sorted by class": (entries[by_class].reshape(-1, 32), labels[by_class].reshape(-1, 32)),
    "one at a time": (entries.reshape(-1, 1), labels.reshape(-1, 1)),
}
policies = {
    "running statistics": {"state": state},
    "batch statistics (wrong mode)": {"state": state, "use_batch_stats": True},
    "state never updated": {"state": nj.BatchStats.init()},
}
accuracy = {}
for policy, arguments in policies.items():
    norm = functools.partial(nj.batch_norm, layout="N", axis_names="N", train=False, **arguments)
    classify = jax.jit(jax.vmap(lambda batch, norm=norm: norm(batch)[0] > 0))
    for feed, (batches, truth) in feeds.items():
        accuracy[policy, feed] = 100 * (np.asarray(classify(batches)) == truth).mean()

# %%
figure, panels = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained", width_ratios=[1, 1.25])
names = {True: "batch statistics (wrong mode)", False: "running statistics"}
for use_batch_stats, colour, marker in [(True, ORANGE, "s"), (False, BLUE, "o")]:
    low, middle, high = np.percentile(outputs[use_batch_stats], [5, 50, 95], axis=1)
    panels[0].plot(sizes, middle, marker + "-", color=colour, label=names[use_batch_stats])
    panels[0].fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
panels[0].set(xscale="log", xlabel="size of the batch it is evaluated in", ylabel="output (standard deviations)")
panels[0].set_xticks(sizes, sizes)
panels[0].minorticks_off()
panels[0].set_title("output for x = 5: median, and 5 to 95 % of 300 batches")
panels[0].legend(frameon=False, loc="lower right")

width = 0.26
for shift, (policy, colour) in enumerate(zip(policies, [BLUE, ORANGE, SKY], strict=True), start=-1):
    heights = [accuracy[policy, feed] for feed in feeds]
    bars = panels[1].bar(np.arange(len(feeds)) + shift * width, heights, width, color=colour, label=policy)
    panels[1].bar_label(bars, fmt="%.0f", fontsize=9)
panels[1].set_xticks(range(len(feeds)), feeds)
panels[1].axhline(50, color="black", linewidth=0.8, linestyle=":")
panels[1].set(ylabel="accuracy (%)", ylim=(0, 125), yticks=range(0, 101, 25), title="two classes; dotted: guessing")
panels[1].legend(frameon=False, loc="upper center", ncols=3, fontsize=9, columnspacing=1)
plt.show()

noise = {size: outputs[True][i].std() for i, size in enumerate(sizes)}
print("spread of the output × √m:", {m: round(float(noise[m] * m**0.5), 1) for m in (8, 16, 32, 64, 128)})

# %% [markdown]
# **Meaning.** On mixed batches the wrong mode looks fine, so a test that feeds shuffled data misses it. Sort the same
# data or send one example, and it guesses. A state that was dropped on the way (not returned from the training step,
# not saved in the checkpoint) guesses on any data. Two cheap checks: the output of one example must not change with its
# batch-mates, and `state.count` must not be 0.

# %%
# The start wears off as predicted, up to the noise of the average (4 standard errors), and the others never hold it.
for name, running in averages.items():
    plain = isinstance(running, nj.Ema) and not running.debias
    for t in (1, 10, 100, 1000):
        if isinstance(running, nj.Ema):
            weights = running.new_weight * (1 - running.new_weight) ** np.arange(t)
            weights = weights if plain else weights / weights.sum()
        else:
            weights = np.full(t, 1 / t)
        noise_of_mean = np.sqrt(VAR / M * np.sum(weights**2))
        assert abs(history[name][0][t - 1] - MEAN * weights.sum()) < 4 * noise_of_mean + 1e-5, (name, t)
np.testing.assert_allclose(last["Cumulative()"].mean, stream.mean(), rtol=1e-5)
gaps = {name: curves[2][-200:].mean() for name, curves in history.items()}
assert gaps["Cumulative(unbiased=True)"] == min(gaps.values())
np.testing.assert_allclose(last["Cumulative()"].var * M / (M - 1), last["Cumulative(unbiased=True)"].var, rtol=1e-4)
np.testing.assert_allclose(last["Cumulative(unbiased=True)"].var, VAR, rtol=4 * np.sqrt(2 / (M * STEPS)))
assert gaps["Ema(0.5)"] == max(gaps.values())

# Batch statistics: batch-mates matter, one example gives β = 0. Running statistics: neither.
assert np.ptp(outputs[False]) == 0
assert np.ptp(outputs[True][-1]) > 0.1
assert not outputs[True][0].any()
assert 1.5 < noise[8] / noise[32] < 3  # a quarter of the batch, about twice the noise

# The bug hides on mixed batches only; a state that was never updated shows everywhere.
right, wrong, dropped = policies
assert min(accuracy[right, feed] for feed in feeds) > 97
assert accuracy[wrong, "mixed batches"] > 97
assert max(accuracy[wrong, "sorted by class"], accuracy[wrong, "one at a time"]) < 60
assert max(accuracy[dropped, feed] for feed in feeds) < 60
assert nj.BatchStats.init().count == 0 < state.count
