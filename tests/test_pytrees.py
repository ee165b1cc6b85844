"""The pytree laws: what `Affine`, `BatchStats` and `Moments` are to JAX, optax, Flax and Python."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.trees import SPEC, every_tree, filled, replicas_of, same

# --- the class


@every_tree
def test_fields_are_frozen(make):
    tree = make()
    for field in dataclasses.fields(tree):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(tree, field.name, None)


@pytest.mark.parametrize("names", ["N C", ("N", "C"), ["N", "C"], (name for name in "NC"), {"N": 0, "C": 0}])
def test_names_are_kept_as_a_tuple(names):
    assert nj.Affine(None, None, names).names == ("N", "C")


@pytest.mark.parametrize("cls", [nj.Affine, nj.BatchStats, nj.Moments])
def test_names_are_static_and_none_by_default(cls):
    leaves = [field.name for field in dataclasses.fields(cls) if field.name not in ("names", "zero_centered")]
    tree = cls(*range(len(leaves)), names="N C")
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] == [
        f".{name}" for name in leaves
    ]
    assert jax.tree.leaves(tree) == list(range(len(leaves)))
    assert jax.tree.structure(tree) == jax.tree.structure(cls(*leaves, names=("N", "C")))
    assert jax.tree.structure(tree) != jax.tree.structure(cls(*leaves, names="C N"))
    assert cls(*leaves).names == ()


def test_whether_a_scale_is_zero_centred_is_static():
    one, other = nj.Affine.init(C=3), nj.Affine.init(C=3, zero_centered=True)
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert jax.tree.map(lambda leaf: leaf, other).zero_centered


@every_tree
def test_equality_is_identity_so_that_it_never_asks_an_array_for_its_truth(make):
    tree = make()
    assert tree == tree
    assert tree != make()
    assert len({tree, tree, make()}) == 2


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            nj.Affine.init(N=2, C=3, bias=False, dtype=jnp.bfloat16),
            "Affine(scale=bfloat16[2,3], bias=None, names='N C', zero_centered=False)",
        ),
        (
            nj.BatchStats.init(C=64),
            "BatchStats(mean=float32[64], var=float32[64], count=int32(0), weight=float32[64], names='C')",
        ),
        (
            nj.BatchStats(np.float32(0.1), jnp.bfloat16(2), np.array(7), 1.5),
            "BatchStats(mean=float32(0.1), var=bfloat16(2), count=int64(7), weight=1.5, names='')",
        ),
        (
            nj.Affine(jax.random.key(0), jax.ShapeDtypeStruct((), jnp.float32)),
            "Affine(scale=key<fry>[], bias=float32[], names='', zero_centered=False)",
        ),
        (nj.Moments(1, None, P("data")), f"Moments(mean=1, var=None, count={P('data')!r}, names='')"),
    ],
)
def test_the_repr_shows_shapes_names_and_the_values_of_scalars(tree, text):
    assert repr(tree) == text


def test_the_repr_of_what_has_no_value_shows_its_shape():
    seen = []
    jax.jit(lambda tree: seen.append(repr(tree)))(nj.Affine.init())
    gone = nj.Affine.init()
    jax.tree.map(lambda leaf: leaf.delete(), gone)
    assert [*seen, repr(gone)] == ["Affine(scale=float32[], bias=float32[], names='', zero_centered=False)"] * 2


ANYTHING = [None, 0, "spec", P("data"), object(), nnx.Param(jnp.ones(3)), jax.ShapeDtypeStruct((3,), jnp.float32)]


@pytest.mark.parametrize("leaf", ANYTHING, ids=[type(leaf).__name__ for leaf in ANYTHING])
@every_tree
def test_a_leaf_may_be_anything(make, leaf):
    tree = make()
    leaves, structure = jax.tree.flatten(tree)
    rebuilt = jax.tree.unflatten(structure, [leaf] * len(leaves))
    assert type(rebuilt) is type(tree)
    assert rebuilt.names == tree.names
    fields = [getattr(rebuilt, field.name) for field in dataclasses.fields(rebuilt)]
    assert sum(field is leaf for field in fields) >= len(leaves)
    assert rebuilt.names == dataclasses.replace(rebuilt).names
    assert type(rebuilt).__name__ in repr(rebuilt)


def test_shapes_are_checked_at_use_and_not_before():
    params = nj.Affine(jnp.ones((4, 4)), "no bias at all", "C C C")
    assert params.names == ("C", "C", "C")
    with pytest.raises(ValueError, match=r"^batch_norm: params"):
        nj.batch_norm(np.ones((2, 3)), nj.Affine(jnp.ones(4), None, "C"), train=True, **SPEC)


def test_nnx_variables_are_opened_at_use(rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    params, state = filled(rng)
    wrapped = jax.tree.map(nnx.Param, params), jax.tree.map(nnx.BatchStat, state)
    for mode in ({"train": True}, {"train": False}):
        y, new = nj.batch_norm(x, *wrapped, **mode, **SPEC)
        expected, right = nj.batch_norm(x, params, state, **mode, **SPEC)
        np.testing.assert_array_equal(y, expected)
        if mode["train"]:
            same(new, right)


# --- aliases and donation


@every_tree
def test_fresh_leaves_share_no_buffer(make):
    leaves = jax.tree.leaves(make())
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


PRODUCERS = {
    "update": lambda x, p, s: nj.update(s, nj.moments(x, **SPEC)),
    "update by nothing": lambda x, p, s: nj.update(s, nj.Moments.init(C=3)),
    "training": lambda x, p, s: nj.batch_norm(x, p, s, train=True, **SPEC)[1],
    "pooling": lambda x, p, s: nj.pool_stats(replicas_of(s), "device"),
    "moments": lambda x, p, s: nj.moments(x, **SPEC),
    "moments of no centre": lambda x, p, s: nj.moments(x, center=False, **SPEC),
    "moments of an empty batch": lambda x, p, s: nj.moments(x[:0], **SPEC),
    "merge": lambda x, p, s: nj.merge(nj.moments(x, **SPEC)),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("produce", PRODUCERS.values(), ids=PRODUCERS.keys())
def test_what_a_function_returns_can_be_donated_at_once(produce, jitted, rng):
    x = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    made = (jax.jit(produce) if jitted else produce)(x, *filled(rng))
    leaves = jax.tree.leaves(made)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(made)
    assert all(leaf.is_deleted() for leaf in leaves)


def test_a_donated_training_loop_is_the_undonated_one(rng):
    x = rng.normal(2.0, 3.0, (3, 4, 3)).astype(np.float32)
    params = nj.Affine.init(C=3)

    def step(params, state, x):
        y, state = nj.batch_norm(x, params, state, train=True, **SPEC)
        return jax.tree.map(lambda leaf: leaf + jnp.mean(y), params), state

    def run(step):
        carry = jax.tree.map(jnp.copy, (params, nj.BatchStats.init(C=3)))
        for part in x:
            carry = step(*carry, part)
        return carry

    same(run(jax.jit(step, donate_argnums=(0, 1))), run(jax.jit(step)))


# --- transforms take them apart


@every_tree
def test_tree_map_keeps_class_and_names(make):
    tree = make()
    doubled = jax.tree.map(lambda leaf: leaf * 2, tree)
    assert type(doubled) is type(tree)
    assert doubled.names == tree.names
    for one, other in zip(jax.tree.leaves(doubled), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other) * 2)


def test_in_axes_may_be_a_tree_of_the_class(rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    scale, bias = (rng.normal(size=shape).astype(np.float32) for shape in [(5, 3), (3,)])
    layer = lambda params: nj.layer_norm(x, params, layout="N D", axis_names="D")[0]  # noqa: E731
    y = jax.jit(jax.vmap(layer, in_axes=(nj.Affine(0, None, "D"),)))(nj.Affine(scale, bias, "D"))
    for i in range(5):
        close(y[i], reference.normalize(x, scale[i], bias, names="D", layout="N D", axis_names="D"), m=3)


def test_partition_specs_may_be_a_tree_of_the_class(rng):
    x = rng.normal(size=(4, 8)).astype(np.float32)
    params, state = filled(rng, 8)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    along = P("model")
    specs = nj.Affine(along, along, "C"), nj.BatchStats(along, along, P(), along, "C")
    layer = functools.partial(nj.batch_norm, train=True, **SPEC)
    sharded = jax.shard_map(
        layer, mesh=mesh, in_specs=(P(None, "model"), *specs), out_specs=(P(None, "model"), specs[1])
    )
    y, new = jax.jit(sharded)(x, params, state)
    expected, right = jax.jit(layer)(x, params, state)
    close(y, expected, m=4)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(right), strict=True):
        close(one, other, m=4)


def stacked_layers(rng, depth=4):
    layers = [filled(rng) for _ in range(depth)]
    return layers, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def test_vmap_over_stacked_parameters_and_states_is_a_loop(rng):
    x = rng.normal(2.0, 3.0, (8, 3)).astype(np.float32)
    layers, stacked = stacked_layers(rng)
    layer = functools.partial(nj.batch_norm, x, train=True, **SPEC)
    y, new = jax.jit(jax.vmap(layer))(*stacked)
    batch = reference.moments(x, **SPEC)
    for i, (params, state) in enumerate(layers):
        close(y[i], reference.normalize(x, params.scale, params.bias, names="C", **SPEC), m=8)
        mean, var, _ = reference.update(state.mean, state.var, state.weight, *batch, rule="ema")
        close(new.mean[i], mean, m=8)
        close(new.var[i], var, m=8)
        assert new.count[i] == 5


def test_scan_over_stacked_layers_is_a_loop(rng):
    x = rng.normal(2.0, 3.0, (8, 3)).astype(np.float32)
    layers, stacked = stacked_layers(rng)

    @jax.jit
    def network(x):
        return jax.lax.scan(lambda x, layer: nj.batch_norm(x, *layer, train=True, **SPEC), x, stacked)

    y, new = network(x)
    right = x
    for i, (params, state) in enumerate(layers):
        batch = reference.moments(right, **SPEC)
        mean, var, _ = reference.update(state.mean, state.var, state.weight, *batch, rule="ema")
        right = reference.normalize(right, params.scale, params.bias, names="C", **SPEC)
        # Each layer divides by its own deviation |γ| ≤ 3 of the one before and adds an error of its own.
        close(new.mean[i], mean, m=8, k=128)
        close(new.var[i], var, m=8, k=128)
    close(y, right, m=8, k=128)
    assert new.names == ("C",)


# --- compiled once


def test_step_two_and_another_eps_or_new_weight_do_not_trace_again(rng):
    x = rng.normal(size=(8, 3)).astype(np.float32)
    params, state = filled(rng)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state, eps, new_weight):
        def loss(params):
            options = {"eps": eps, "running": nj.Ema(new_weight), "train": True}
            y, new = nj.batch_norm(x, params, state, **options, **SPEC)
            return jnp.sum(y**3), new

        gradients, new = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients), new

    for eps, new_weight in [(1e-5, 0.1), (1e-5, 0.1), (1e-3, 0.2)]:
        params, state = step(params, state, eps, new_weight)
    assert state.count == 7


def test_trees_built_anew_do_not_trace_again():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def layer(x, params, state):
        return nj.batch_norm(x, params, state, train=False, **SPEC)[0]

    x = jnp.ones((2, 3))
    for names in ("C", ("C",), ["C"]):
        params = nj.Affine(jnp.ones(3), jnp.zeros(3), names)
        layer(x, params, dataclasses.replace(nj.BatchStats.init(C=3), names=names))
