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
# # 2 · Forward and backward: what the gradient loses
#
# A group of $m$ entries has $\mu = \frac1m\sum x_i$, $\;v = \frac1m\sum (x_i-\mu)^2$, $\;r = \sqrt{v+\varepsilon}$,
# $\;\hat x_i = (x_i-\mu)/r$ and $y_i = \gamma\,\hat x_i + \beta$. Since every $\hat x_i$ depends on every $x_j$ of the
# group,
#
# $$\frac{\partial \hat x_i}{\partial x_j} = \frac1r\left(\delta_{ij} - \frac1m - \frac{\hat x_i \hat x_j}{m}\right).$$
#
# **Question.** What does this matrix do to a gradient that passes through it? And is the hand-written rule the same as
# differentiating the formula?
#
# **Prediction.** It is $1/r$ times a projection: a gradient loses its mean (the direction of all ones) and nearly all
# of its share along $\hat x$. All else passes. Hand-written rule and autodiff agree to rounding.

# %%
import functools

import jax
import matplotlib.pyplot as plt
import numpy as np

import normjax as nj

jax.config.update("jax_enable_x64", True)  # so that "equal" can mean 1e-10
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito: safe for the colour-blind

y, _ = nj.normalize(
    np.array([1.0, 3.0, 5.0, 7.0]), nj.Affine(2.0, 1.0, ()), layout="N", axis_names="N", derivative="autodiff"
)
print("x = (1, 3, 5, 7), γ = 2, β = 1: y =", np.round(y, 3))

# %% [markdown]
# ## The Jacobian of batch norm
#
# **Experiment.** A batch of eight examples with three features, sorted within each feature so that the pattern shows.
# Outputs and inputs are listed feature by feature, which makes a 24 × 24 matrix: once with the hand-written rule
# (`derivative="vjp"`), once by differentiating the plain formula (`"autodiff"`), once in evaluation, where running
# statistics stand in for the batch's.

# %%
N, C, EPS = 8, 3, 1e-5
x = np.sort(np.random.default_rng(0).normal(scale=[0.7, 1.0, 1.6], size=(N, C)), axis=0)
state = nj.BatchStats(x.mean(axis=0), x.var(axis=0), np.int32(1), np.ones(C, "float32"), "C")


@functools.partial(jax.jit, static_argnames=("train", "derivative"))
def jacobian(x, *, train, derivative):
    def by_feature(columns):
        arguments = {"layout": "C N", "axis_names": "N", "train": train, "eps": EPS, "derivative": derivative}
        return nj.batch_norm(columns, state=state, **arguments)[0]

    return jax.jacrev(by_feature)(x.T).reshape(x.size, x.size)


analytic = np.asarray(jacobian(x, train=True, derivative="vjp"))
autodiff = np.asarray(jacobian(x, train=True, derivative="autodiff"))
evaluation = np.asarray(jacobian(x, train=False, derivative="vjp"))


def formula(column):
    """∂x̂/∂x of one group, as it stands above."""
    m, r = column.size, np.sqrt(column.var() + EPS)
    normalised = (column - column.mean()) / r
    return (np.eye(m) - 1 / m - np.outer(normalised, normalised) / m) / r


by_hand = [formula(column) for column in x.T]
print(f"largest entry of the Jacobian            {np.abs(analytic).max():.2f}")
print(f"hand-written rule against autodiff:      below 1e-13? {np.abs(analytic - autodiff).max() < 1e-13}")
blocks = [analytic[c * N : (c + 1) * N, c * N : (c + 1) * N] for c in range(C)]
print(f"hand-written rule against formula above: below 1e-13? {np.abs(np.array(blocks) - by_hand).max() < 1e-13}")

# %% [markdown]
# **Picture.** Red raises the output, blue lowers it. The first three share one scale, the fourth has its own.

# %%
figure, panels = plt.subplots(1, 4, figsize=(13, 3.7), layout="constrained")
reach = max(np.abs(analytic).max(), np.abs(evaluation).max())
titles = ["training, hand-written rule", "training, autodiff", "evaluation"]
for panel, title, matrix in zip(panels[:3], titles, [analytic, autodiff, evaluation], strict=True):
    shown = panel.imshow(matrix, cmap="RdBu_r", vmin=-reach, vmax=reach)
    panel.set_title(title)
figure.colorbar(shown, ax=panels[2], label="∂output / ∂input", shrink=0.8)
difference = panels[3].imshow(np.abs(analytic - autodiff) * 1e16, cmap="cividis")
panels[3].set_title("|rule − autodiff|")
figure.colorbar(difference, ax=panels[3], label="difference (10⁻¹⁶)", shrink=0.8)
for panel in panels:
    middles = [N * c + N / 2 - 0.5 for c in range(C)]
    panel.set_xticks(middles, [f"feature {c}" for c in range(C)])
    panel.set_yticks(middles, [f"feature {c}" for c in range(C)], rotation=90, va="center")
    panel.tick_params(length=0)
    for border in (N - 0.5, 2 * N - 0.5):
        panel.axhline(border, color="grey", linewidth=0.6)
        panel.axvline(border, color="grey", linewidth=0.6)
panels[0].set(xlabel="input (8 examples each)", ylabel="output (8 examples each)")
plt.show()

# %% [markdown]
# **Meaning.** Features do not mix: off the diagonal blocks all is zero. Inside a block *examples* mix, in training
# only; in evaluation each output depends on its own input alone. Training and evaluation have different Jacobians even
# where they have equal statistics, as here.
#
# ## What it projects out
#
# **Question.** Which directions does a block let through?
#
# **Prediction.** Of its eight eigenvalues, one is 0 (the ones direction: shifting the batch changes nothing), six are
# $1/r$, and the one along $x-\mu$ is $\varepsilon/(v+\varepsilon)^{3/2}$: zero only as $\varepsilon \to 0$, since
# scaling the batch changes nothing then.

# %%
column = x[:, 1]
ones, along = np.ones(N) / np.sqrt(N), (column - column.mean()) / np.linalg.norm(column - column.mean())
cotangent = np.random.default_rng(1).normal(size=N)


@jax.jit
def block_and_pullback(column, cotangent, eps):
    normalised = lambda column: nj.normalize(column, layout="N", axis_names="N", eps=eps)[0]  # noqa: E731
    return jax.jacrev(normalised)(column), jax.vjp(normalised, column)[1](cotangent)[0]


epsilons = [1e-5, 0.3, 3.0]
found = {}
for eps in epsilons:
    block, gradient = map(np.asarray, block_and_pullback(column, cotangent, eps))
    found[eps] = {
        "eigenvalues": np.linalg.eigvalsh(block)[::-1],
        "along": along @ block @ along,
        "predicted": eps / (column.var() + eps) ** 1.5,
        "lost mean": abs(ones @ gradient) < 1e-12,
    }

figure, panels = plt.subplots(1, 2, figsize=(11, 3.7), layout="constrained")
for eps, marker, colour in zip(epsilons, "os^", [BLUE, ORANGE, GREEN], strict=True):
    panels[0].plot(range(1, N + 1), found[eps]["eigenvalues"], marker, color=colour, label=f"ε = {eps:g}", alpha=0.8)
panels[0].set(xlabel="eigenvalue number", ylabel="eigenvalue (1 / unit of x)", title="spectrum of one feature's block")
panels[0].legend(frameon=False)

gradient = np.asarray(block_and_pullback(column, cotangent, EPS)[1])
width = 0.38
for shift, name, vector, colour in [
    (-width / 2, "arriving", cotangent, BLUE),
    (width / 2, "leaving", gradient, ORANGE),
]:
    shares = [abs(ones @ vector), abs(along @ vector)]
    shares.append(np.sqrt(vector @ vector - np.square(shares).sum()))
    bars = panels[1].bar(np.arange(3) + shift, shares, width, color=colour, label=f"gradient {name}")
    panels[1].bar_label(bars, fmt="%.2g", fontsize=9)
panels[1].set_xticks(range(3), ["along the ones", "along x̂", "all other directions"])
panels[1].set(ylabel="length of that part", title=f"a random gradient, ε = {EPS:g}")
panels[1].legend(frameon=False, loc="upper left")
plt.show()

for eps, values in found.items():
    print(f"ε = {eps:<7g} eigenvalue along x̂: {values['along']:.6f}, predicted {values['predicted']:.6f}")

# %% [markdown]
# **Meaning.** A loss cannot ask a normalised layer to move its batch up, or to stretch it: those two of the $m$
# directions are taken out of every gradient. The gradient of a bias just before a batch norm is the sum of what
# leaves, so it is zero: that bias is a wasted parameter.
#
# ## Layer norm: γ stays inside
#
# **Question.** Batch norm has one $\gamma$ per group, so its backward may read
# $\frac{\gamma}{r}\left(g_j - \overline{g} - \hat x_j\,\overline{g\hat x}\right)$. Layer norm has one
# $\gamma_j$ per *entry* of a group. May it still be pulled out in front?
#
# **Prediction.** No. The right rule projects $u = \gamma g$; pulling $\gamma$ out is right only where all
# $\gamma_j$ are equal, and its error grows with their spread.

# %%
D = 12
rng = np.random.default_rng(2)
features, g, direction = rng.normal(size=D), rng.normal(size=D), rng.normal(size=D)


@functools.partial(jax.jit, static_argnames="derivative")
def pullback(features, scale, *, derivative):
    layer = lambda features: nj.layer_norm(  # noqa: E731
        features, nj.Affine(scale, None, "D"), layout="D", axis_names="D", eps=EPS, derivative=derivative
    )[0]
    return jax.vjp(layer, features)[1](g)[0]


def project(vector):
    normalised = (features - features.mean()) / np.sqrt(features.var() + EPS)
    return vector - vector.mean() - normalised * (vector * normalised).mean()


def pulled_out(scale):
    """The wrong rule: γ in front of the projection."""
    return scale / np.sqrt(features.var() + EPS) * project(g)


spreads = np.linspace(0, 0.5, 11)
errors = {"γ inside (normjax)": [], "γ pulled out": []}
for spread in spreads:
    scale = 1 + spread * direction
    truth = np.asarray(pullback(features, scale, derivative="autodiff"))
    rule = np.asarray(pullback(features, scale, derivative="vjp"))
    for name, gradient in zip(errors, [rule, pulled_out(scale)], strict=True):
        errors[name].append(np.linalg.norm(gradient - truth) / np.linalg.norm(truth))

# %%
figure, panels = plt.subplots(1, 2, figsize=(11, 3.7), layout="constrained")
index = np.arange(D)
panels[0].bar(index, truth, 0.7, color="#BBBBBB", label="autodiff")
panels[0].plot(index, rule, "o", color=BLUE, label="γ inside (normjax)")
panels[0].plot(index, pulled_out(scale), "x", color=ORANGE, markersize=8, markeredgewidth=2, label="γ pulled out")
panels[0].axhline(0, color="black", linewidth=0.8)
panels[0].set(xlabel="feature (index)", ylabel="∂loss / ∂x", title=f"one example, γ = 1 + {spreads[-1]:g} · N(0, 1)")
for (name, values), marker, colour in zip(errors.items(), "ox", [BLUE, ORANGE], strict=True):
    panels[1].plot(spreads, values, marker + "-", color=colour, label=name)
panels[1].set(
    xlabel="spread of γ (standard deviation)", ylabel="relative error of ∂loss / ∂x", title="against autodiff"
)
panels[0].legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
panels[1].legend(frameon=False)
plt.show()

# %% [markdown]
# **Meaning.** The two rules coincide at the usual start, $\gamma = 1$, so a test with fresh parameters cannot tell them
# apart; trained parameters can. Test a backward with unequal $\gamma$ and a random cotangent.

# %%
# Hand-written rule, autodiff and the formula agree; features do not mix; evaluation is diagonal.
np.testing.assert_allclose(analytic, autodiff, atol=1e-13)
np.testing.assert_allclose(blocks, by_hand, atol=1e-13)
assert np.count_nonzero(analytic) <= C * N * N
np.testing.assert_allclose(evaluation, np.diag(np.repeat(1 / np.sqrt(x.var(axis=0) + EPS), N)), atol=1e-13)

# One eigenvalue is zero, m − 2 are 1/r, one is ε/(v+ε)^(3/2); gradients lose their mean.
for eps, values in found.items():
    expected = [0.0, values["predicted"], *[(column.var() + eps) ** -0.5] * (N - 2)]
    np.testing.assert_allclose(np.sort(values["eigenvalues"]), np.sort(expected), atol=1e-12)
    np.testing.assert_allclose(values["along"], values["predicted"], atol=1e-12)
    assert values["lost mean"]

# Pulling γ out of layer norm is right for equal γ only.
assert max(errors["γ inside (normjax)"]) < 1e-12
assert errors["γ pulled out"][0] < 1e-12
assert errors["γ pulled out"][-1] > 0.1
