"""Every transform of JAX around every norm, by each derivative, against the same transform of the plain formula.

One table: a row says how a transform is taken of f(x, scale, bias) → y, giving numbers. In float64, within 1e-10 of the
largest entry, as tests/derivatives.py derives it. Under masks: tests/test_higher_derivatives.py; with state:
tests/cases/test_transforms.py.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.contract import problems
from tests.derivatives import DERIVATIVES, FAMILIES, first, float64_inputs, library, near
from tests.quick import quick_jit

PLATFORMS = ("cpu", "cuda", "tpu")
POLICIES = {
    "save nothing": None,
    "save everything": jax.checkpoint_policies.everything_saveable,
    "save the statistics": jax.checkpoint_policies.save_only_these_names("normjax_stats"),
    "save all but the statistics": jax.checkpoint_policies.save_anything_except_these_names("normjax_stats"),
}


@dataclasses.dataclass(frozen=True)
class At:
    """Where a transform is taken: x, scale and bias, a tangent of each, a cotangent of y, and two more x."""

    primals: tuple
    tangents: tuple
    g: np.ndarray
    others: np.ndarray

    @property
    def x(self):
        return self.primals[0]

    @property
    def v(self):
        return self.tangents[0]

    def loss(self, f):
        """x, scale, bias → a number, with derivatives of every order."""
        return lambda *primals: jnp.sum(self.g * jnp.sin(f(*primals)))

    def of_x(self, f):
        """The loss as a function of x alone."""
        return lambda x: self.loss(f)(x, *self.primals[1:])


jax.tree_util.register_dataclass(At)


# --- the norm itself


def value(f, at):
    return f(*at.primals)


def grad(f, at):
    return jax.grad(at.loss(f), (0, 1, 2))(*at.primals)


def jvp(f, at):
    return jax.jvp(f, at.primals, at.tangents)


def jacfwd(f, at):
    return jax.jacfwd(f, (0, 1, 2))(*at.primals)


def jacrev(f, at):
    return jax.jacrev(f, (0, 1, 2))(*at.primals)


def linearize(f, at):
    y, linear = jax.linearize(f, *at.primals)
    return y, linear(*at.tangents)


def linearize_transposed(f, at):
    _, linear = jax.linearize(f, *at.primals)
    return jax.linear_transpose(linear, *at.primals)(at.g)


def tangent_by_two_vjps(f, at):
    """A cotangent's pullback is linear in it, so its own pullback, whatever the cotangent, is the tangent."""
    pullback = jax.vjp(f, *at.primals)[1]
    return jax.vjp(pullback, at.g)[1](at.tangents)


# --- second and third derivatives


def linearize_of_grad(f, at):
    slope, linear = jax.linearize(jax.grad(at.loss(f), (0, 1, 2)), *at.primals)
    return slope, linear(*at.tangents)


def forward_over_reverse(f, at):
    return jax.jvp(jax.grad(at.loss(f), (0, 1, 2)), at.primals, at.tangents)[1]


def reverse_over_forward(f, at):
    return jax.grad(lambda *primals: jax.jvp(at.loss(f), primals, at.tangents)[1], (0, 1, 2))(*at.primals)


def reverse_over_reverse(f, at):
    return jax.grad(problems.projected_gradient(at.loss(f), at.tangents, (0, 1, 2)), (0, 1, 2))(*at.primals)


def hessian(outer, inner):
    return lambda f, at: outer(inner(at.of_x(f)))(at.x)


def along(function, direction):
    """The derivative of a function of x in a direction, in forward mode."""
    return lambda x: jax.jvp(function, (x,), (direction,))[1]


def projected(function, direction):
    """The inner product of an array-valued function of x with a direction."""
    return lambda x: jnp.vdot(direction, function(x))


def laplacian(second):
    """Σᵢ second(loss, eᵢ), as one pass for all directions."""

    def total(f, at):
        basis = jnp.eye(at.x.size).reshape(-1, *at.x.shape)
        return jnp.sum(jax.vmap(lambda e: second(at.of_x(f), e)(at.x))(basis))

    return total


def third_reverse(f, at):
    once = projected(jax.grad(at.of_x(f)), at.v)
    return jax.grad(projected(jax.grad(once), at.others[0]))(at.x)


def third_reverse_over_forward_over_reverse(f, at):
    return jax.grad(projected(along(jax.grad(at.of_x(f)), at.v), at.others[0]))(at.x)


def third_forward_over_reverse(f, at):
    return along(along(jax.grad(at.of_x(f)), at.v), at.others[0])(at.x)


def third_forward(f, at):
    return along(along(along(at.of_x(f), at.v), at.others[0]), at.others[1])(at.x)


# --- batches and checkpoints


def mapped(transform):
    """The same for three x at once, parameters shared."""

    def over_examples(f, at):
        one = lambda x: transform(f, dataclasses.replace(at, primals=(x, *at.primals[1:])))  # noqa: E731
        return jax.vmap(one)(jnp.stack([at.x, *at.others]))

    return over_examples


def grad_of_vmap(f, at):
    """Of x mapped over its second axis and parameters over their first, y over its last."""
    xs, stack = jnp.stack([at.x, *at.others], 1), lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf])
    norm = jax.vmap(f, in_axes=(1, 0, 0), out_axes=-1)
    loss = lambda *primals: jnp.sum(at.g[..., None] * jnp.sin(norm(*primals)))  # noqa: E731
    return jax.grad(loss, (0, 1, 2))(xs, *map(stack, at.primals[1:]))


def checkpointed(transform, policy=None):
    return lambda f, at: transform(jax.checkpoint(f, policy=policy), at)


# --- control flow


def as_layers(loop):
    """Transforms of layers that a loop makes: loop(layer, x, at) → y, with layer(h, other) → h."""

    def of(transform):
        def taken(f, at):
            def layers(x, scale, bias):
                return loop(lambda h, other: f(jnp.tanh(h) + other, scale, bias), x, at)

            return transform(layers, at)

        return taken

    return of


@as_layers
def scan(layer, x, at):
    return lax.scan(lambda h, other: (layer(h, other), None), x, at.others)[0]


@as_layers
def scan_of_checkpoints(layer, x, at):
    return lax.scan(jax.checkpoint(lambda h, other: (layer(h, other), None)), x, at.others)[0]


def two(at):
    """The number 2, which no compiler knows."""
    return jnp.sum(jnp.isfinite(at.others[:, 0, 0, 0, 0]))


@as_layers
def while_loop(layer, x, at):
    return lax.while_loop(lambda c: c[0] < two(at), lambda c: (c[0] + 1, layer(c[1], at.others[c[0]])), (0, x))[1]


def descent(f, at):
    """The tangent of gradient steps in a while_loop."""
    slope = jax.grad(at.of_x(f))
    steps = lambda x: lax.while_loop(lambda c: c[0] < two(at), lambda c: (c[0] + 1, c[1] - 0.1 * slope(c[1])), (0, x))  # noqa: E731
    return jax.jvp(lambda x: steps(x)[1], (at.x,), (at.v,))


@as_layers
def cond(layer, x, at):
    """A norm in the branch that is taken, and one in the branch that is not."""
    less = lambda h, other: h - other  # noqa: E731
    return lax.cond(two(at) > 2, layer, less, lax.cond(two(at) == 2, layer, less, x, at.others[0]), at.others[1])


# --- programs


def donated(f, at):
    x = jnp.array(at.x)
    step = quick_jit(jax.value_and_grad(at.loss(f), (0, 1, 2)), donate_argnums=0)
    numbers = step(x, *at.primals[1:])
    assert x.is_deleted()
    return numbers


def exported(f, at):
    back = there_and_back(f, *at.primals)
    return quick_jit(lambda at: (back.call(*at.primals), grad(back.call, at)))(at)


def there_and_back(f, *args):
    """f exported for every platform, with its gradient."""
    program = export.export(jax.jit(f), platforms=PLATFORMS)(*args)
    assert program.platforms == PLATFORMS
    return export.deserialize(program.serialize(vjp_order=1))


# --- the table

# When it lowers the program JAX says the one, and the other where the tangent is itself differentiated.
REFUSED = r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function|rule for 'custom_lin' not implemented"


@dataclasses.dataclass(frozen=True)
class Row:
    """How a transform is taken.

    Attributes:
      take: (f, at) → numbers.
      forward: whether it takes f itself in forward mode, not the gradient of f: what JAX refuses of a custom_vjp.
      whole: whether it brings its own jit.
      families: those that every run takes, if not one in turn.
      case: its number in the list of cases.
    """

    take: Callable
    forward: bool = False
    whole: bool = False
    families: tuple[str, ...] = ()
    case: int | None = None


FEW = ("batch", "layer", "rms")
TRANSFORMS = {
    # the norm itself
    "jvp": Row(jvp, forward=True, families=FAMILIES, case=57),
    "jacfwd": Row(jacfwd, forward=True, families=(*FEW, "group"), case=57),
    "jacrev": Row(jacrev),
    "linearize": Row(linearize, forward=True, families=(*FEW, "group"), case=57),
    "linearize, transposed": Row(linearize_transposed),
    "tangent by two vjps": Row(tangent_by_two_vjps),
    # second derivatives
    "linearize of grad": Row(linearize_of_grad),
    "Hv, forward over reverse": Row(forward_over_reverse, families=FAMILIES, case=59),
    "Hv, reverse over forward": Row(reverse_over_forward, forward=True, case=59),
    "Hv, reverse over reverse": Row(reverse_over_reverse, families=("batch",), case=59),
    "hessian": Row(hessian(jax.jacfwd, jax.jacrev), families=FEW, case=57),
    "jacrev of jacfwd": Row(hessian(jax.jacrev, jax.jacfwd), forward=True, case=57),
    "jacrev of jacrev": Row(hessian(jax.jacrev, jax.jacrev), families=("batch", "rms"), case=57),
    "jacfwd of jacfwd": Row(hessian(jax.jacfwd, jax.jacfwd), forward=True, families=("layer",), case=57),
    "Laplacian, jvp of jvp": Row(laplacian(lambda loss, e: along(along(loss, e), e)), forward=True),
    "Laplacian, jvp of grad": Row(laplacian(lambda loss, e: projected(along(jax.grad(loss), e), e))),
    # third derivatives
    "third, reverse": Row(third_reverse, families=("batch", "layer"), case=59),
    "third, reverse over forward over reverse": Row(third_reverse_over_forward_over_reverse, case=59),
    "third, forward over reverse": Row(third_forward_over_reverse, case=59),
    "third, forward": Row(third_forward, forward=True, case=59),
    # batches
    "vmap of grad": Row(mapped(grad)),
    "vmap of jvp": Row(mapped(jvp), forward=True),
    "vmap of Hv": Row(mapped(forward_over_reverse)),
    "grad of vmap": Row(grad_of_vmap),
    # checkpoints
    **{f"checkpoint, {name}": Row(checkpointed(grad, policy), case=61) for name, policy in POLICIES.items()},
    "checkpoint, Hv": Row(checkpointed(forward_over_reverse), case=61),
    "checkpoint, jvp": Row(checkpointed(jvp), forward=True, case=61),
    # control flow
    "scan": Row(scan(grad), case=62),
    "scan, Hv": Row(scan(forward_over_reverse), case=62),
    "scan, jvp": Row(scan(jvp), forward=True, case=62),
    "scan of checkpoints": Row(scan_of_checkpoints(grad), case=62),
    "while_loop": Row(while_loop(value)),
    "while_loop, jvp": Row(while_loop(jvp), forward=True),
    "while_loop of gradient steps, jvp": Row(descent),
    "cond": Row(cond(grad)),
    "cond, jvp": Row(cond(jvp), forward=True),
    # programs
    "donation": Row(donated, whole=True, families=("batch", "batch_eval")),
    "export": Row(exported, whole=True, families=(*FEW, "batch_eval")),
}


def cells() -> list:
    """All of the table, of which every run takes the families of a row, and `-m matrix` the others.

    The plain formula by another path ("autodiff") is taken in the rows of one family alone.
    """
    made = []
    for at, (name, row) in enumerate(TRANSFORMS.items()):
        often = row.families or (FAMILIES[at % len(FAMILIES)],)
        case = [] if row.case is None else [pytest.mark.case(row.case)]
        for family, derivative in itertools.product(FAMILIES, DERIVATIVES):
            every_run = family in often and (derivative != "autodiff" or len(often) == 1)
            marks = case if every_run else [*case, pytest.mark.matrix]
            made.append(pytest.param(name, family, derivative, marks=marks))
    return made


@functools.cache
def norms(family: str) -> tuple[At, dict[str, Callable]]:
    """Where the family's transforms are taken, the norm by each derivative, and the plain formula."""
    given = problems.problem(family, "channels last")
    values = float64_inputs(given, "none")
    rng = np.random.default_rng(0)
    tangents = tuple(rng.normal(size=np.shape(primal)) for primal in first(values))
    full = problems.full_mask(given, values)
    by = {derivative: library(given, values, derivative, None) for derivative in DERIVATIVES}
    by["plain"] = lambda *primals: problems.plain(given, *primals, values.mean, values.var, full)
    return At(first(values), tangents, values.g, values.xs[1:]), by


@functools.cache
def numbers(transform: str, family: str, norm: str) -> list[np.ndarray]:
    """What the transform gives of a norm."""
    row, (at, by) = TRANSFORMS[transform], norms(family)
    take = functools.partial(row.take, by[norm])
    return [np.asarray(leaf) for leaf in jax.tree.leaves((take if row.whole else quick_jit(take))(at))]


@pytest.mark.parametrize(("transform", "family", "derivative"), cells())
def test_a_transform_of_a_norm_is_that_of_the_plain_formula(transform, family, derivative, x64):
    row, (at, by) = TRANSFORMS[transform], norms(family)
    if row.forward and derivative == "vjp":
        with pytest.raises((TypeError, NotImplementedError), match=REFUSED):
            jax.jit(functools.partial(row.take, by["vjp"])).lower(at)
        return
    expected = numbers(transform, family, "plain")
    assert max(np.max(np.abs(leaf)) for leaf in expected) > 1e-2
    for leaf, wanted in zip(numbers(transform, family, derivative), expected, strict=True):
        near(leaf, wanted)


@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
@pytest.mark.parametrize(("norm", "axis_names"), [(nj.batch_norm, "N"), (nj.layer_norm, "C")])
def test_arrays_so_large_that_the_cpu_sums_in_its_own_way_are_exported_for_every_platform(
    norm, axis_names, derivative, rng
):
    x, g = rng.normal(1.5, 2.0, (2, 512, 128)).astype(np.float32)
    scale, bias = rng.normal(size=(2, 128)).astype(np.float32)
    spec = {"layout": "N C", "axis_names": axis_names}

    def layer(x, scale, bias):
        return norm(x, nj.Affine(scale, bias, "C"), train=True, derivative=derivative, **spec)[0]

    y, pullback = jax.vjp(there_and_back(layer, x, scale, bias).call, x, scale, bias)
    close(y, reference.normalize(x, scale, bias, names="C", **spec), m=512)
    for slope, wanted in zip(pullback(g), reference.backward(x, g, scale, bias, names="C", **spec), strict=True):
        close(slope, wanted, m=512)
