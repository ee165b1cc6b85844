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
# # 4 · Many devices, each with few examples
#
# Data-parallel training gives each device a part of the batch. Batch norm then has a choice: each device pools its own
# examples alone, or all devices pool together (synchronised batch norm). In normjax the choice is one more name:
# `axis_names="N"` or `axis_names="N data"`.
#
# **Question.** Eight devices train one model. How few examples may each of them hold, with and without
# synchronisation?
#
# **Prediction.** A mean of $m$ examples misses the true mean by about $\sigma/\sqrt m$. Synchronised, the mean is of
# $8m$ examples, so the noise is $\sqrt 8 = 2.8$ times smaller. With one example on each device and no synchronisation,
# $x - \mu = 0$: every output is $\beta$ and nothing can be learned. With two, $\hat x$ is $+1$ or $-1$ up to
# $\varepsilon$: it tells which of the two is larger, not by how much. Synchronised, one on each device is a batch of
# eight.
#
# Here the eight devices are lanes of `jax.vmap(…, axis_name="data")`. `shard_map` over real devices gives the same
# numbers (the library's tests compare them); `vmap` is faster on one processor and needs no devices.

# %%
import functools
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import normjax as nj

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito
DEVICES, PER_DEVICE = 8, [1, 2, 4, 8]
POOLED = {"each device alone": "N", "synchronised": "N data"}  # what is compared: axis_names
STYLES = {"each device alone": (ORANGE, "s"), "synchronised": (BLUE, "o")}

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images, labels = (digits.data[order] / 16).astype("float32"), digits.target[order]
train_x, train_y, test_x, test_y = images[:1437], labels[:1437], images[1437:], labels[1437:]

# %% [markdown]
# ## The noise
#
# **Experiment, one.** Draw 500 batches of digits. On each device, the mean of every pixel that the layer would
# subtract; its error is measured in standard deviations of the pixel, over the pixels that are not constant.

# %%
spread = train_x.std(0)
alive = spread > 0.05


@functools.partial(jax.jit, static_argnames="axis_names")
def means(x, per_device, axis_names):
    """Of batches (batch, device, N, C): the mean that each device uses of the first `per_device` rows of each."""
    counted = jnp.arange(x.shape[-2])[:, None] < per_device
    one = lambda x: nj.moments(x, layout="N C", axis_names=axis_names, where=counted).mean  # noqa: E731
    return jax.vmap(jax.vmap(one, axis_name="data"))(x)


noise = {name: [] for name in POOLED}
rng = np.random.default_rng(1)
drawn = train_x[rng.integers(len(train_x), size=(500, DEVICES, max(PER_DEVICE)))][..., alive]
for per_device, (name, axis_names) in itertools.product(PER_DEVICE, POOLED.items()):
    error = (means(drawn, per_device, axis_names) - train_x.mean(0)[alive]) / spread[alive]
    noise[name].append(float(jnp.sqrt((error**2).mean())))

# %%
figure, panel = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
for name, (colour, marker) in STYLES.items():
    pooled = np.array(PER_DEVICE) * (DEVICES if name == "synchronised" else 1)
    panel.plot(PER_DEVICE, noise[name], marker, color=colour, label=name)
    label = "predicted, 1/√(number of examples pooled)" if name == "synchronised" else None
    panel.plot(PER_DEVICE, pooled**-0.5, "-", color="grey", linewidth=1, zorder=0, label=label)
panel.set(
    xscale="log", yscale="log", xlabel="examples on each of 8 devices", ylabel="noise of the mean (std. deviations)"
)
panel.set_xticks(PER_DEVICE, PER_DEVICE)
panel.set_yticks([0.1, 0.2, 0.5, 1], ["0.1", "0.2", "0.5", "1"])
panel.minorticks_off()
panel.set_ylim(0.1, 1.2)
panel.legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# ## What it costs
#
# **Experiment, two.** A perceptron with two hidden layers of 64 units, batch norm before each ReLU, Adam, 8 passes
# over 1437 digits, three seeds. Only `axis_names` differs between the two. Devices that were not synchronised hold
# different running statistics; `pool_stats` makes one state of them. Evaluation uses the running statistics, on 360
# other digits.

# %%
WIDTH, PASSES = 64, 8
optimiser = optax.adam(3e-3)


def init(seed):
    rng = np.random.default_rng(seed)
    sizes = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
    kernels = [(rng.normal(size=size) * (2 / size[0]) ** 0.5).astype("float32") for size in sizes]
    states = [jax.tree.map(lambda leaf: np.stack([leaf] * DEVICES), nj.BatchStats.init(C=WIDTH))] * 2
    return (kernels, [nj.Affine.init(C=WIDTH)] * 2), states


def apply(params, states, x, **options):
    kernels, affines = params
    new = []
    for kernel, affine, state in zip(kernels[:-1], affines, states, strict=True):
        x, state = nj.batch_norm(x @ kernel, affine, state, layout="N C", **options)
        x = jax.nn.relu(x)
        new.append(state)
    return x @ kernels[-1], new


@functools.partial(jax.jit, static_argnames="axis_names")
def fit(params, states, batches, steps, per_device, axis_names):
    """Parameters, and each device's states, after training on batches of indices (step, device, N).

    Only the first `steps` batches count, and of each device's rows the first `per_device`: one program for all sizes.
    """
    counted = jnp.arange(batches.shape[-1]) < per_device

    def loss(params, states, x, y):
        def device(states, x):
            return apply(params, states, x, axis_names=axis_names, train=True, where=counted[:, None])

        logits, states = jax.vmap(device, axis_name="data")(states, x)
        terms = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.sum(terms * counted) / (DEVICES * per_device), states

    def step(i, carry):
        params, states, opt = carry
        x, y = jnp.asarray(train_x)[batches[i]], jnp.asarray(train_y)[batches[i]]
        grads, states = jax.grad(loss, has_aux=True)(params, states, x, y)
        updates, opt = optimiser.update(grads, opt)
        return optax.apply_updates(params, updates), states, opt

    return jax.lax.fori_loop(0, steps, step, (params, states, optimiser.init(params)))[:2]


@jax.jit
def evaluate(params, states):
    """The accuracy on the held-out digits, in percent."""
    pool = jax.vmap(lambda state: nj.pool_stats(state, "data"), axis_name="data", out_axes=None)
    logits, _ = apply(params, [pool(state) for state in states], test_x, axis_names="N", train=False)
    return 100 * (logits.argmax(-1) == test_y).mean()


def batches_of(per_device, seed):
    """Indices (step, device, N) and the number of steps; every pass is a new order of the training digits."""
    size = DEVICES * per_device
    orders = [np.random.default_rng((seed, p)).permutation(len(train_x)) for p in range(PASSES)]
    passes = [order[: len(order) // size * size].reshape(-1, DEVICES, per_device) for order in orders]
    batches = np.concatenate(passes)
    filled = np.zeros((len(train_x) // DEVICES * PASSES, DEVICES, max(PER_DEVICE)), batches.dtype)
    filled[: len(batches), :, :per_device] = batches
    return filled, len(batches)


accuracy = {name: np.zeros((len(PER_DEVICE), 3)) for name in POOLED}
for name, axis_names in POOLED.items():
    for (i, per_device), seed in itertools.product(enumerate(PER_DEVICE), range(3)):
        trained = fit(*init(seed), *batches_of(per_device, seed), per_device, axis_names)
        accuracy[name][i, seed] = evaluate(*trained)
for name, rows in accuracy.items():
    print(f"{name:<18}", {m: [round(a, 1) for a in row.tolist()] for m, row in zip(PER_DEVICE, rows, strict=True)})

# %% [markdown]
# **Picture.** The mean of three seeds, and each seed as a small dot.

# %%
figure, panel = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
for name, (colour, marker) in STYLES.items():
    panel.plot(PER_DEVICE, accuracy[name].mean(1), marker + "-", color=colour, label=name)
    panel.plot(PER_DEVICE, accuracy[name], ".", color=colour, markersize=4, alpha=0.6)
panel.axhline(10, color="black", linewidth=0.8, linestyle=":", label="guessing")
panel.set(xscale="log", xlabel="examples on each of 8 devices", ylabel="accuracy on held-out digits (%)", ylim=(0, 104))
panel.set_xticks(PER_DEVICE, PER_DEVICE)
panel.minorticks_off()
for m, row in zip(PER_DEVICE[:3], accuracy["each device alone"], strict=False):
    panel.annotate(f"{row.mean():.0f} %", (m, row.mean()), xytext=(10, -12), textcoords="offset points", color=ORANGE)
panel.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# **Meaning.** Synchronised, the per-device batch does not matter here: the batch of all devices does. Each device
# alone, the model learns nothing from one example, with two it misreads about one digit in six, and from four on the
# two are within two points. So synchronise where a device holds few examples. In a convolutional network the positions
# of an image are pooled as well, and two images on a device may be enough: what matters is how many entries share a
# mean.

# %%
for name, rows in noise.items():
    pooled = np.array(PER_DEVICE) * (DEVICES if name == "synchronised" else 1)
    np.testing.assert_allclose(rows, pooled**-0.5, rtol=0.05)

alone, together = (dict(zip(PER_DEVICE, accuracy[name], strict=True)) for name in POOLED)
assert alone[1].max() < 20  # guessing
assert alone[2].mean() < together[2].mean() - 8
assert abs(alone[4].mean() - together[4].mean()) < 3
assert alone[8].min() > 95 > alone[2].max()
assert min(rows.min() for rows in together.values()) > 96
assert abs(together[1].mean() - together[8].mean()) < 1.5
