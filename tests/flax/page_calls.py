"""The calls in the tables of docs/flax.md, by a part of their text, for either library.

MEASURED gives the numbers of linen's module, where the row is about it, and of nnx's; REFUSED the calls of each.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

from tests.flax.rows import LINEN, NNX
from tests.quick import quick_jit


def linen_call(library, kind, x, mask=None, features=None, **settings):
    """In training; batch norm with new statistics, of `features` entries where it has several axes."""
    module = getattr(LINEN[library], kind)(**settings)
    if kind != "BatchNorm":
        return module.init_with_output(jax.random.key(0), x, mask=mask)[0]
    ones, zeros = (
        make(x.shape[settings.get("axis", -1)] if features is None else features) for make in (jnp.ones, jnp.zeros)
    )
    variables = {"params": {"scale": ones, "bias": zeros}, "batch_stats": {"mean": zeros, "var": ones}}
    return module.apply(variables, x, mask=mask, use_running_average=False, mutable=["batch_stats"])[0]


def nnx_call(library, kind, x, mask=None, features=None, **settings):
    module = getattr(NNX[library], kind)(
        x.shape[-1] if features is None else features, **settings, rngs=flax_nnx.Rngs(0)
    )
    return module(x, mask=mask)


def both(kind, x, mask=None, **settings):
    return lambda library: [call(library, kind, x, mask, **settings) for call in (linen_call, nnx_call)]


COLUMN = jnp.array([[1.0], [2.0], [6.0], [jnp.nan]])
COUNTS = jnp.array([[True], [True], [True], [False]])


def masked_gradient(library):
    def loss(call):
        return lambda x: jnp.sum(jnp.where(COUNTS, call(x), 0) ** 3)

    for call in (linen_call, nnx_call):
        yield quick_jit(jax.grad(loss(lambda x, call=call: call(library, "BatchNorm", x, COUNTS))))(COLUMN)


def synchronised(second):
    x = jnp.array([[1.0, 1, 1, 1], [6, 9, 9, 9]])[..., None]
    mask = jnp.array([[1, 1, 1, 1], second], bool)[..., None]

    def of(library):
        variables = {"params": {"scale": jnp.ones(1), "bias": jnp.zeros(1)}}
        variables["batch_stats"] = {"mean": jnp.zeros(1), "var": jnp.ones(1)}

        def by_linen(x, mask):
            module = LINEN[library].BatchNorm(use_running_average=False, momentum=0.0, axis_name="data")
            stats = module.apply(variables, x, mask=mask, mutable=["batch_stats"])[1]["batch_stats"]
            return jnp.stack([stats["mean"], stats["var"]])

        def by_nnx(x, mask):
            module = NNX[library].BatchNorm(1, momentum=0.0, axis_name="data", rngs=flax_nnx.Rngs(0))
            module(x, mask=mask)
            return jnp.stack([module.mean.get_value(), module.var.get_value()])

        for call in (by_linen, by_nnx):
            first, other = quick_jit(jax.vmap(call, axis_name="data"))(x, mask)
            np.testing.assert_array_equal(first, other)
            yield first

    return of


def half_evaluation(library):
    norm = NNX[library].BatchNorm(1, dtype=jnp.bfloat16, use_running_average=True, rngs=flax_nnx.Rngs(0))
    norm.mean.set_value(jnp.array([100.3]))
    yield norm(jnp.array([[101.0]]))


IMAGES = jnp.arange(48.0).reshape(2, 2, 3, 4)


def first_position(library):
    yield nnx_call(library, "GroupNorm", IMAGES, num_groups=2, reduction_axes=(2, 3))[0, 0, 0]


MEASURED = {
    "40000": both("LayerNorm", jnp.array([[40000.0, 40001, 40002, 40003]]), epsilon=1e-5),
    "seven times 1e6": both("LayerNorm", jnp.full((1, 7), 1e6)),
    "1e25": both("RMSNorm", jnp.array([[1e25, -1e25]])),
    "masked NaN": masked_gradient,
    "on two devices": synchronised([1, 0, 0, 0]),
    "all masked": synchronised([0, 0, 0, 0]),
    "bfloat16": half_evaluation,
    "the first position": first_position,
}


def calls(kind, x, mask=None, **settings):
    """One call in each library of modules, by name of the library."""
    return [lambda library, call=call: call(library, kind, x, mask, **settings) for call in (linen_call, nnx_call)]


def evaluated(x, mask):
    """Batch norm in evaluation, in each."""
    made = {"mask": mask, "use_running_average": True}
    return [
        lambda library: LINEN[library].BatchNorm().init_with_output(jax.random.key(0), x, **made)[0],
        lambda library: NNX[library].BatchNorm(x.shape[-1], rngs=flax_nnx.Rngs(0))(x, **made),
    ]


def complex_cast(call):
    """The call without NumPy's warning that a cast drops imaginary parts."""

    def quiet(library):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
            return call(library)

    return quiet


def mapped(x, **settings):
    """Batch norm under vmap over the first axis, in each."""
    name = settings.get("axis_name", "data")
    return [
        lambda library, call=call: jax.vmap(lambda x: call(library, "BatchNorm", x, **settings), axis_name=name)(x)
        for call in (linen_call, nnx_call)
    ]


IN_GROUPS = {"axis_name": "data", "axis_index_groups": [[0, 1], [2, 3]]}
REFUSED = {
    "(0, 1, 2, 3)": calls("GroupNorm", IMAGES, num_groups=2, reduction_axes=(0, 1, 2, 3))[1:],
    "axis=(1, 3)": calls("BatchNorm", IMAGES, features=8, axis=(1, 3))[1:],
    "size 1": calls("GroupNorm", IMAGES[:, :, :2], jnp.ones((2, 2, 2, 1), bool), num_groups=2),
    "axis_index_groups": mapped(jnp.ones((4, 2, 1)), **IN_GROUPS),
    "(3, 1)": [
        calls("LayerNorm", IMAGES, feature_axes=(3, 1))[0],
        calls("LayerNorm", IMAGES, features=8, feature_axes=(3, 1))[1],
        *calls("LayerNorm", IMAGES, reduction_axes=(3, 1)),
    ],
    "a batch of one": mapped(jnp.arange(6.0).reshape(2, 3)),
    "(N, C)": [*calls("InstanceNorm", IMAGES[0, 0]), *calls("LayerNorm", IMAGES, reduction_axes=())],
    "a mask of the integers": calls("LayerNorm", IMAGES, jnp.array([1, 0, 1, 1]))[1:],
    "a mask of floats": calls("LayerNorm", IMAGES, jnp.array([1.0, 0.0, 1.0, 1.0]))[:1],
    "in evaluation, with a mask": evaluated(IMAGES, jnp.ones(3, bool)),
    "of complex x": [complex_cast(calls("LayerNorm", IMAGES + 1j, dtype=jnp.float32)[1])],
    "momentum=1.5": [*calls("BatchNorm", IMAGES, momentum=1.5), *calls("LayerNorm", IMAGES, epsilon=-1e-6)],
    "data-0": [call for name in ("data-0", "0", "my.data") for call in mapped(IMAGES, axis_name=name)],
}
