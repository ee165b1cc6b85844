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
# # 5 · One gradient for each example
#
# Differential privacy clips the gradient of each example; influence functions and the gradient noise scale compare
# them. All ask for $g_i = \nabla_\theta\, \ell_i$, and `vmap(grad(loss))` computes them at once, provided that
# $\ell_i$ depends on example $i$ alone. A norm decides whether it does.
#
# **Question.** Which norms let examples meet, and what is then the gradient of one example?
#
# **Prediction.** A norm couples the examples that share a mean: batch norm in training all of them, ghost batches the
# members of each, layer, group and instance norm none. Alone under `vmap`, an example in batch norm is a batch of one.
# Without positions $\hat x = 0$, and every weight before it gets the gradient 0; an image has positions, so it gets
# the gradients of instance norm.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import normjax as nj
from normjax.per_example import coupled_grads, example_coupling, per_example_grads, plot_coupling

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images, labels = (digits.images[order, :, :, None] / 16).astype("float32"), digits.target[order]

# %% [markdown]
# ## Who meets whom
#
# **Experiment, one.** `example_coupling(fn, x)` pulls random vectors back through the norm: cell (i, j) is the size of
# $\partial y_i / \partial x_j$. Eight digits, six norms.

# %%
STATE = nj.BatchStats.init(C=1)
NORMS = {
    "batch": lambda x: nj.batch_norm(x, layout="N H W C", axis_names="N H W", train=True)[0],
    "batch, evaluation": lambda x: nj.batch_norm(x, None, STATE, layout="N H W C", axis_names="N H W", train=False)[0],
    "ghost batches of 4": lambda x: nj.batch_norm(x, layout="(B n=4) H W C", axis_names="n H W", train=True)[0],
    "layer": lambda x: nj.layer_norm(x, layout="N H W C", axis_names="H W C")[0],
    "group": lambda x: nj.group_norm(x, layout="N H W (G=1 K)", axis_names="H W K")[0],
    "instance": lambda x: nj.instance_norm(x, layout="N H W C", axis_names="H W")[0],
}
coupling = {name: np.asarray(example_coupling(norm, images[:8])) for name, norm in NORMS.items()}

# %% [markdown]
# **Picture.** Off the diagonal the numbers are small, since each of 8 · 64 pixels moves a mean by little; so the
# colours are logarithmic, and a white cell is a derivative of exactly 0.

# %%
figure, panels = plt.subplots(2, 3, figsize=(8, 5.4), layout="constrained", sharex=True, sharey=True)
for panel, (name, strength) in zip(panels.flat, coupling.items(), strict=True):
    plot_coupling(strength, ax=panel, title=name, limits=(-1, 2))
    panel.label_outer()
figure.colorbar(panels[0, 0].images[0], ax=panels, label="log₁₀ size of ∂ output i / ∂ input j", shrink=0.8)
plt.show()

# %% [markdown]
# ## A network's gradients, one by one
#
# **Experiment, two.** A convolution, a norm, ReLU, another of the three, and a dense layer on the mean over positions,
# trained for 100 steps of 64 digits, with group norm and with batch norm. Then the gradient of each of 64 fresh
# examples: for group norm by `per_example_grads`; for batch norm by `coupled_grads`, which differentiates each loss
# in the whole batch. `vmap(grad)` of batch norm is taken too.

# %%
CHANNELS, BATCH = 8, 64


def normed(family, x, params, train=True):
    if family == "group":
        return nj.group_norm(x, params, layout="N H W C=(G=4 K)", axis_names="H W K")[0]
    return nj.batch_norm(x, params, layout="N H W C", axis_names="N H W", train=train)[0]


def losses(family, params, batch):
    x, y = batch
    for kernel, affine in params["convolutions"]:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(normed(family, x, affine))
    logits = x.mean((1, 2)) @ params["dense"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def init(seed):
    rng = np.random.default_rng(seed)
    shapes = [(3, 3, 1, CHANNELS), (3, 3, CHANNELS, CHANNELS)]
    kernels = [(rng.normal(size=s) * (2 / np.prod(s[:3])) ** 0.5).astype("float32") for s in shapes]
    dense = (rng.normal(size=(CHANNELS, 10)) * CHANNELS**-0.5).astype("float32")
    return {"convolutions": [(kernel, nj.Affine.init(C=CHANNELS)) for kernel in kernels], "dense": dense}


optimiser = optax.adam(1e-2)


@functools.partial(jax.jit, static_argnums=0)
def trained(family, params):
    def step(i, carry):
        params, opt = carry
        batch = [jax.lax.dynamic_slice_in_dim(jnp.asarray(a), i % 20 * BATCH, BATCH) for a in (images, labels)]
        grads = jax.grad(lambda p: losses(family, p, batch).mean())(params)
        updates, opt = optimiser.update(grads, opt)
        return optax.apply_updates(params, updates), opt

    return jax.lax.fori_loop(0, 100, step, (params, optimiser.init(params)))[0]


def loss_of_one(family):
    return lambda params, image, label: losses(family, params, (image[None], label[None]))[0]


def rows(family):
    """f(params, batch) → the gradient of every example, each as one row of numbers."""

    @jax.jit
    def of_each(params, batch):
        if family == "group":
            grads = per_example_grads(loss_of_one(family), params, *batch)
        else:
            grads = coupled_grads(functools.partial(losses, family), params, batch)
        return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(grads)], 1)

    return of_each


params = {family: trained(family, init(0)) for family in ("group", "batch")}
fresh = jnp.asarray(images[-BATCH:]), jnp.asarray(labels[-BATCH:])
each = {family: np.asarray(rows(family)(params[family], fresh)) for family in params}
alone = jax.jit(jax.vmap(jax.grad(loss_of_one("batch")), (None, 0, 0)))(params["batch"], *fresh)
blind = float(max(jnp.abs(kernel).max() for kernel, _ in alone["convolutions"]))
print(f"largest gradient of a kernel, bare vmap(grad) through batch norm on single images: {blind:.2g}")

# %% [markdown]
# As predicted, no zeros: on an image a batch of one still has 64 positions to pool. They are the gradients of instance
# norm, another network than the one that was trained. `per_example_grads` refuses:

# %%
try:
    per_example_grads(loss_of_one("batch"), params["batch"], *fresh)
except ValueError as error:
    refusal = str(error)
    print(refusal)

# %% [markdown]
# Rows of `coupled_grads` add up to the gradient of the batch, like those of uncoupled examples:

# %%
for family in params:
    whole = jax.jit(jax.grad(lambda p, family=family: losses(family, p, fresh).sum()))(params[family])
    whole = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(whole)])
    print(f"{family}: largest difference {np.abs(each[family].sum(0) - whole).max():.1e} of {np.abs(whole).max():.1f}")

# %% [markdown]
# ## The gradient noise scale
#
# The mean gradient of $B$ examples has the variance $\operatorname{tr}\Sigma / B$ if examples are independent, where
# $\Sigma$ is the covariance of the $g_i$; $\operatorname{tr}\Sigma / |G|^2$ is the *simple noise scale*, the batch size
# beyond which more examples help little (McCandlish et al. 2018).
#
# **Prediction.** With group norm, $\operatorname{tr}\Sigma$ from the rows of one batch and $B$ times the variance of
# the mean gradient over many batches are two estimates of one number. With batch norm they are not: the rows of a batch
# share its statistics; if that makes them alike, their spread within the batch falls short, and the ratio is below 1.
#
# **Experiment, three.** 600 batches of 8, both estimates, for both networks; and for each eighth of the batches.

# %%
SMALL, DRAWS = 8, 600
rng = np.random.default_rng(2)
indices = np.stack([rng.choice(len(images), SMALL, replace=False) for _ in range(DRAWS)])


def traces(batches):
    """Two estimates of tr Σ, from gradients (batch, example, parameter)."""
    return batches.var(1, ddof=1).sum(-1).mean(), SMALL * batches.mean(1).var(0, ddof=1).sum()


ratios, eighths = {}, {}
for family in params:
    of_each = rows(family)
    drawn = np.stack([of_each(params[family], (images[i], labels[i])) for i in indices])
    within, between = traces(drawn)
    squared = (drawn.mean((0, 1)) ** 2).sum() - between / SMALL / DRAWS  # |G|², without its own noise
    parts = [traces(part) for part in np.split(drawn, 8)]
    ratios[family], eighths[family] = within / between, [one / other for one, other in parts]
    print(
        f"{family}: noise scale by rows {within / squared:.1f}, by means {between / squared:.1f}: {ratios[family]:.2f}"
    )

# %%
figure, panels = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
for place, (family, colour) in enumerate((("group", BLUE), ("batch", ORANGE))):
    sizes = np.linalg.norm(each[family], axis=1)
    panels[0].plot(np.sort(sizes), np.arange(1, BATCH + 1) / BATCH, color=colour, label=f"{family} norm")
    panels[1].plot([place] * 8, eighths[family], ".", color=colour, alpha=0.6)
    panels[1].plot([place - 0.2, place + 0.2], [ratios[family]] * 2, color=colour)
panels[0].set(xlabel="size of one example's gradient", ylabel="share of examples below", ylim=(0, 1.02))
panels[0].legend(frameon=False)
panels[1].axhline(1, color="grey", linewidth=0.8, linestyle=":")
panels[1].set_xticks([0, 1], ["group norm", "batch norm"])
panels[1].set(xlim=(-0.5, 1.5), ylabel="tr Σ by rows / tr Σ by means")
plt.show()

# %% [markdown]
# **Picture.** Left, the sizes of 64 gradients. Right, the ratio of the two estimates: a line for all batches, a dot for
# each eighth of them.
#
# **Meaning.** Group norm's examples are independent, and either estimate serves, the ratio being 1 within the scatter
# of the dots. With batch norm the gradient of one example exists only within its batch, its rows are no independent
# samples, and in batches of 8 their spread falls short by some 15 %: there the noise scale must be measured from whole
# batches, of the size that is used. (The two networks stand at different points of their training: their noise scales
# do not compare.)

# %%
FULL, NONE = np.ones((8, 8), bool), np.eye(8, dtype=bool)
assert ((coupling["batch"] > 0) == FULL).all()
assert ((coupling["ghost batches of 4"] > 0) == np.kron(np.eye(2), np.ones((4, 4)))).all()
for name in ("batch, evaluation", "layer", "group", "instance"):
    assert ((coupling[name] > 0) == NONE).all()
assert "batch of one" in refusal
assert ratios["batch"] < 0.93 < ratios["group"]
