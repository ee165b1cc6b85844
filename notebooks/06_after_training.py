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
# # 6 · It trains, then evaluation is garbage
#
# In training batch norm needs no memory: it normalises by the batch at hand. Whatever happens to the running
# statistics, the loss falls. They are first used when training is over.
#
# **Question.** A network trains well and then evaluates badly. Which of the classic faults is it, and can one batch
# tell?
#
# **Prediction.** Four faults leave the training loss as it is, and each its own trace in one batch. Evaluated with
# batch statistics, the outputs of an image move with its batch-mates and not with the running statistics. Discarded
# statistics come back from a training call as they went in. Averages that were never warmed up are a mixture of their
# start, mean 0 and variance 1, and the batch. Statistics of other data lie many standard errors from the batch's. All
# are cured without training again. A fifth fault leaves no statistics behind to look at: norms that were folded wrongly
# into the layers before them. There only the outputs tell.

# %%
import functools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import normjax as nj
from normjax.diagnose import diagnose
from normjax.fold import fold
from normjax.recalibrate import recalibrate

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images, labels = (digits.data[order] / 16).astype("float32"), digits.target[order]
train_images, train_labels, test_images, test_labels = images[:1397], labels[:1397], images[1397:], labels[1397:]

# %% [markdown]
# ## A network that trains
#
# Two dense layers, each with batch norm and ReLU, and a third; 150 steps of 64 digits.

# %%
CHANNELS, BATCH, STEPS = 64, 64, 150


def network(params, stats, x, train, running=None):
    new = {}
    for name in ("first", "second"):
        kernel, affine = params[name]
        x, new[name] = nj.batch_norm(
            x @ kernel, affine, stats[name], layout="N C", axis_names="N", train=train, running=running or nj.Ema(0.1)
        )
        x = jax.nn.relu(x)
    return x @ params["dense"], new


def init():
    rng = np.random.default_rng(1)
    draw = lambda *size: jnp.asarray(rng.normal(size=size) * (2 / size[0]) ** 0.5, jnp.float32)  # noqa: E731
    layers = {name: (draw(64, CHANNELS), nj.Affine.init(C=CHANNELS)) for name in ("first", "second")}
    return {**layers, "dense": draw(CHANNELS, 10)}


FRESH = {name: nj.BatchStats.init(C=CHANNELS) for name in ("first", "second")}
optimiser = optax.adam(1e-2)


@jax.jit
def trained(params):
    """Parameters, running statistics, and the loss of every step."""

    def step(carry, i):
        params, stats, opt = carry
        x, y = (
            jax.lax.dynamic_slice_in_dim(jnp.asarray(a), i % 21 * BATCH, BATCH) for a in (train_images, train_labels)
        )

        def loss(params):
            logits, new = network(params, stats, x, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = optimiser.update(grads, opt)
        return (optax.apply_updates(params, updates), stats, opt), value

    (params, stats, _), losses = jax.lax.scan(step, (params, FRESH, optimiser.init(params)), jnp.arange(STEPS))
    return params, stats, losses


params, sound, losses = trained(init())
print(f"loss of the first step {losses[0]:.2f}, of the last {losses[-1]:.3f}")

# %% [markdown]
# ## Four faults
#
# **Experiment.** Each fault is a pair: what the network does when called, and the statistics it is left with.
#
# 1. *Wrong mode*: evaluation normalises by its batch. Fair on shuffled digits; so it is shown what a service may see,
#    all images of a class at once.
# 2. *Discarded*: the function that calls the network in training hands back the old state. (Where it is the loop around
#    it that drops the new one, the finding is *never updated*.)
# 3. *Never warmed up*: a checkpoint was restored without its statistics, and three batches followed.
# 4. *Other data*: the camera changed, and images have half the contrast on a grey ground.

# %%
grey = lambda x: 0.5 + x / 2  # noqa: E731
by_class = np.argsort(test_labels, kind="stable")


def right(stats, x, train):
    return network(params, stats, x, train)


def wrong_mode(stats, x, train):
    logits, new = network(params, stats, x, True)
    return logits, new if train else stats


def discards(stats, x, train):
    return network(params, stats, x, train)[0], stats


started = FRESH
for first in range(0, 3 * BATCH, BATCH):
    _, started = jax.jit(right, static_argnums=2)(started, train_images[first : first + BATCH], True)

FAULTS = {
    "wrong mode": (wrong_mode, sound, train_images[:BATCH], test_images[by_class]),
    "discarded": (discards, FRESH, train_images[:BATCH], test_images[by_class]),
    "never warmed up": (right, started, train_images[:BATCH], test_images[by_class]),
    "other data": (right, sound, grey(train_images[:BATCH]), grey(test_images[by_class])),
}


@functools.partial(jax.jit, static_argnums=0)
def evaluated(forward, stats, batches):
    """Which class each image of each batch is taken for."""
    return jax.lax.map(lambda x: forward(stats, x, False)[0].argmax(-1), batches)


def accuracy(forward, stats, x):
    """The share of images that are told right, in batches of 10 in the order of their classes."""
    found = evaluated(forward, stats, x.reshape(40, 10, 64))
    return float((found.ravel() == test_labels[by_class]).mean())


ill = {name: accuracy(forward, stats, x) for name, (forward, stats, _, x) in FAULTS.items()}
healthy = accuracy(right, sound, test_images[by_class])
for name, share in ill.items():
    print(f"{name:<16} {share:6.1%} right, where {healthy:.1%} could be")

# %% [markdown]
# ## One batch tells
#
# `diagnose` calls the network on one batch, some fifty times, with statistics and examples of its choice.

# %%
reports = {name: diagnose(forward, stats, x) for name, (forward, stats, x, _) in FAULTS.items()}
sound_report = diagnose(right, sound, train_images[:BATCH])
for name, report in reports.items():
    print(f"--- {name}\n{str(report).split('not checked')[0].strip()}\n")
print(f"--- the sound network\n{sound_report}")

# %% [markdown]
# **Picture.** The report of the grey images, and that of the sound network: a dot is a channel of a layer, at the
# distance of its batch moments from the running statistics. Beyond the line chance does not explain it.

# %%
reports["other data"].plot()
sound_report.plot()
plt.show()

# %% [markdown]
# ## Cured
#
# The wrong mode is cured by the right one. The other three have sound parameters and bad statistics, so one pass over
# data of the right kind mends them: `recalibrate` merges the moments of all batches exactly.

# %%
plain = lambda x: x  # noqa: E731
step = jax.jit(lambda stats, batch: network(params, stats, batch, True)[1])
RENEWED = {}
for kind, change in (("plain", plain), ("grey", grey)):
    batches = [change(train_images[first : first + BATCH]) for first in range(0, len(train_images), BATCH)]
    RENEWED[kind] = (recalibrate(step, FRESH, batches), change)

CURED = {
    "wrong mode": (right, sound),
    "discarded": (right, RENEWED["plain"][0]),
    "never warmed up": (right, RENEWED["plain"][0]),
    "other data": (right, RENEWED["grey"][0]),
}
well = {name: accuracy(*cure, FAULTS[name][3]) for name, cure in CURED.items()}
after = {kind: diagnose(right, stats, change(train_images[:BATCH])) for kind, (stats, change) in RENEWED.items()}
for name in CURED:
    print(f"{name:<16} {ill[name]:6.1%} → {well[name]:6.1%}")
for kind, report in after.items():
    print(f"re-estimated on {kind} images: {str(report).splitlines()[0]}")

# %%
figure, (left, right_panel) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(1, 1.3))
left.semilogy(np.arange(1, STEPS + 1), losses, color=BLUE, linewidth=1.2)
left.set(xlabel="step", ylabel="training loss (nats)", title="Training does not notice")
rows = np.arange(len(ill))
right_panel.barh(rows - 0.19, [100 * ill[name] for name in ill], 0.36, color=ORANGE, label="with the fault")
right_panel.barh(rows + 0.19, [100 * well[name] for name in ill], 0.36, color=BLUE, label="cured")
right_panel.axvline(100 * healthy, color="grey", linewidth=0.8, linestyle=":", label="the sound network")
right_panel.set_yticks(rows, list(ill))
right_panel.set(xlabel="held-out accuracy (%)", xlim=(0, 101), title="Evaluation does")
right_panel.invert_yaxis()
right_panel.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=3)
plt.show()

# %% [markdown]
# ## Folded, rightly and wrongly
#
# In evaluation each norm is one multiplication and one addition for each channel, and the dense layer before it can do
# both. Here both kernels are 64 × 64: to scale one along its inputs instead of its outputs is a mistake that no shape
# betrays. With `fold` it is a wrong word, `"C I"` for `"I C"`.


# %%
def folded(layout):
    """Kernel and bias of both layers with their norms in them."""
    return {
        name: fold(params[name][0], None, params[name][1], sound[name], layout=layout) for name in ("first", "second")
    }


@jax.jit
def without_norms(layers, x):
    for kernel, bias in (layers["first"], layers["second"]):
        x = jax.nn.relu(x @ kernel + bias)
    return x @ params["dense"]


with_norms = jax.jit(lambda stats, x: network(params, stats, x, False)[0])
unfolded = with_norms(sound, test_images)
FOLDED = {"rightly": folded("I C"), "along the inputs": folded("C I")}
moved, told = {}, {}
for how, layers in FOLDED.items():
    logits = without_norms(layers, test_images)
    moved[how] = float(jnp.max(jnp.abs(logits - unfolded)))
    told[how] = float((logits.argmax(-1) == test_labels).mean())
    print(f"folded {how:<17} logits move by up to {moved[how]:.1g}, {told[how]:6.1%} right")


def milliseconds(calls=200):
    """The median time of a call on all held-out images, with norms and without, in turns."""
    programs = {"with norms": (with_norms, sound), "folded": (without_norms, FOLDED["rightly"])}
    times = {name: [] for name in programs}
    for _ in range(calls):
        for name, (program, first) in programs.items():
            begin = time.perf_counter()
            program(first, test_images).block_until_ready()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: float(np.median(each)) for name, each in times.items()}


for name, each in milliseconds().items():
    print(f"{name:<10} {each:.2f} ms for {len(test_images)} images")

# %% [markdown]
# **Meaning.** The loss curve cannot show any of these, since in training the running statistics do nothing. One batch
# does: what moves the outputs, what a training call gives back, and how far the batch is from the average in units of
# its own standard error. `report.raise_if("error")` belongs in the test that runs before a model is shipped; and a
# pass over the data repairs what training left wrong. After folding no statistics are left to diagnose: compare the
# outputs with the unfolded network's, once, on real data. The accuracy alone may hide it: it falls by few points here.
# What folding saves is what the norms took: between two small dense layers next to nothing, since XLA had fused them.

# %%
TRACES = {
    "wrong mode": "batch statistics in evaluation",
    "discarded": "discarded",
    "never warmed up": "warm-up too short",
    "other data": "drift",
}
for name, trace in TRACES.items():
    assert {finding.fault for finding in reports[name].findings} == {trace}
    assert ill[name] < healthy - 0.05
    assert well[name] > healthy - 0.02
for report in (sound_report, *after.values()):
    assert report.findings == ()
assert healthy > 0.93
assert moved["rightly"] < 1e-4
assert abs(told["rightly"] - healthy) < 0.01
assert moved["along the inputs"] > 1
assert told["along the inputs"] < healthy
assert losses[-1] < 0.1
