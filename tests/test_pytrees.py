"""The pytree laws: what `Affine`, `BatchStats` and `Moments` are to JAX, Flax, optax, orbax and Python."""

import copy
import dataclasses
import functools
import pickle
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.closeness import close

SPEC = {"layout": "N C", "axis_names": "N"}
TREES = {
    "Affine": lambda: nj.Affine.init(N=2, C=3, zero_centered=True, scale_init=1.5),
    "Affine without bias": lambda: nj.Affine.init(C=3, bias=False),
    "BatchStats": lambda: nj.BatchStats.init(C=3),
    "Moments": lambda: nj.Moments.init(N=2, C=3),
}
every_tree = pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())


def same(actual, expected):
    """Two trees are equal in structure (names included), values and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def filled(rng, features=3):
    """Parameters and running statistics away from where they start."""
    scale, bias, mean = (jnp.asarray(rng.normal(size=features), jnp.float32) for _ in range(3))
    var = jnp.asarray(rng.uniform(0.5, 2.0, features), jnp.float32)
    return nj.Affine(scale, bias, "C"), nj.BatchStats(mean, var, jnp.int32(4), jnp.ones(features), "C")


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
            "BatchStats(mean=float32[64], var=float32[64], count=int32[], weight=float32[64], names='C')",
        ),
        (nj.Moments(1, None, P("data")), f"Moments(mean=1, var=None, count={P('data')!r}, names='')"),
    ],
)
def test_the_repr_shows_shapes_and_names(tree, text):
    assert repr(tree) == text


def test_the_repr_of_a_tracer_shows_its_shape():
    seen = []
    jax.jit(lambda tree: seen.append(repr(tree)))(nj.Affine.init(C=3))
    assert seen == ["Affine(scale=float32[3], bias=float32[3], names='C', zero_centered=False)"]


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
    "pooling": lambda x, p, s: nj.pool_stats(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), s_named(s)), "device"),
    "moments": lambda x, p, s: nj.moments(x, **SPEC),
    "moments of no centre": lambda x, p, s: nj.moments(x, center=False, **SPEC),
    "moments of an empty batch": lambda x, p, s: nj.moments(x[:0], **SPEC),
    "merge": lambda x, p, s: nj.merge(nj.moments(x, **SPEC)),
}


def s_named(state):
    return nj.BatchStats(*jax.tree.leaves(state), "device C")


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


# --- training


def problem(rng):
    """Batch, cotangent and start: with the loss Σ g·y, dγ and dβ do not depend on γ and β, so two steps are known."""
    x, g = (rng.normal(size=(8, 3)).astype(np.float32) for _ in range(2))
    params, state = filled(rng)
    _, d_scale, d_bias = reference.backward(x, g, params.scale, params.bias, names="C", **SPEC)
    expected = params.scale - 2 * 0.1 * d_scale, params.bias - 2 * 0.1 * d_bias
    return x, g, params, state, expected


def loss_of(params, state, x, g):
    y, state = nj.batch_norm(x, params, state, train=True, **SPEC)
    return jnp.sum(g * y), state


def test_two_steps_under_optax(rng):
    x, g, params, state, (scale, bias) = problem(rng)
    optimiser = optax.sgd(0.1)

    @jax.jit
    def step(params, state, memory):
        gradients, state = jax.grad(loss_of, has_aux=True)(params, state, x, g)
        updates, memory = optimiser.update(gradients, memory, params)
        return optax.apply_updates(params, updates), state, memory

    memory = optimiser.init(params)
    for _ in range(2):
        params, state, memory = step(params, state, memory)
    close(params.scale, scale, m=8)
    close(params.bias, bias, m=8)
    assert params.names == ("C",)
    assert state.count == 6


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_optimisers_with_memory_keep_the_class(optimiser, rng):
    _, _, params, _, _ = problem(rng)
    optimiser = getattr(optax, optimiser)(0.1)
    memory = optimiser.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        _, memory = optimiser.update(gradients, memory, params)
    assert jax.tree.structure(memory[0].mu) == jax.tree.structure(params)
    close(memory[0].mu.scale, np.full(3, 1 - 0.9**2))


def test_two_steps_under_the_nnx_optimizer(rng):
    x, g, params, state, (scale, bias) = problem(rng)

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.data(jax.tree.map(nnx.Param, params))
            self.stats = nnx.data(jax.tree.map(nnx.BatchStat, state))

        def __call__(self, x):
            y, new = nj.batch_norm(x, self.norm, self.stats, train=True, **SPEC)
            for variable, value in zip(
                jax.tree.leaves(self.stats, is_leaf=lambda node: isinstance(node, nnx.Variable)),
                jax.tree.leaves(new),
                strict=True,
            ):
                variable.set_value(value)
            return y

    model = Model()
    optimiser = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimiser):
        gradients = nnx.grad(lambda model: jnp.sum(g * model(x)))(model)
        optimiser.update(model, gradients)

    for _ in range(2):
        step(model, optimiser)
    close(model.norm.scale.get_value(), scale, m=8)
    close(model.norm.bias.get_value(), bias, m=8)
    assert model.norm.names == ("C",)
    assert model.stats.count.get_value() == 6


# --- there and back


def test_jax_export_there_and_back(rng):
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    params, state = filled(rng)
    params = dataclasses.replace(params, zero_centered=True)

    def layer(x, params, state):
        y, moments = nj.normalize(x, params, **SPEC)
        return y, moments, nj.update(state, moments)

    blob = export.export(jax.jit(layer))(x, params, state).serialize()
    got = export.deserialize(blob).call(x, params, state)
    same(got, jax.jit(layer)(x, params, state))
    assert (got[1].names, got[2].names) == (("C",), ("C",))


def test_jax_export_refuses_parameters_of_other_names(rng):
    x = jnp.ones((8, 3))
    layer = jax.jit(lambda x, params: nj.rms_norm(x, params, layout="N C", axis_names="C")[0])
    blob = export.export(layer)(x, nj.Affine.init(C=3)).serialize()
    with pytest.raises(ValueError, match="tree"):
        export.deserialize(blob).call(x, nj.Affine.init(D=3))


def test_the_gradient_survives_jax_export(rng):
    x, g, params, state, _ = problem(rng)
    loss = jax.jit(lambda params: loss_of(params, state, x, g)[0])
    blob = export.export(loss)(params).serialize(vjp_order=1)
    got = jax.grad(export.deserialize(blob).call)(params)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(jax.grad(loss)(params)), strict=True):
        close(one, other, m=8)


def numbered(tree):
    """The tree with leaves that can be told apart."""
    return jax.tree.map(lambda leaf: leaf + jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape) + 1, tree)


@every_tree
def test_flax_serialization_there_and_back(make):
    tree = {"layers": [numbered(make())]}
    target = {"layers": [make()]}
    same(serialization.from_bytes(target, serialization.to_bytes(tree)), tree)


@every_tree
def test_a_state_dict_holds_the_leaves_and_not_the_names(make):
    tree = numbered(make())
    state_dict = serialization.to_state_dict(tree)
    leaves = {jax.tree_util.keystr(path)[1:]: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    assert {name for name, value in state_dict.items() if value is not None} == set(leaves)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(state_dict[name], leaf)
    same(serialization.from_state_dict(make(), state_dict), tree)


def test_a_state_dict_that_lacks_a_field_says_which():
    with pytest.raises(
        ValueError, match=r"^Affine: .*\['scale'\].*target has \['bias', 'scale'\]; build the target as"
    ):
        serialization.from_state_dict(nj.Affine.init(C=3), {"scale": np.ones(3)})


@pytest.mark.parametrize("biased", [True, False])
def test_a_target_built_otherwise_than_what_was_saved_is_refused(biased):
    saved = serialization.to_state_dict(nj.Affine.init(C=3, bias=biased))
    with pytest.raises(ValueError, match=r"^Affine: .*bias.*build the target as the saved one was built"):
        serialization.from_state_dict(nj.Affine.init(C=3, bias=not biased), saved)


def test_orbax_there_and_back(tmp_path):
    tree = {name.replace(" ", "_"): numbered(make()) for name, make in TREES.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        target = {name.replace(" ", "_"): make() for name, make in TREES.items()}
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
    same(restored, tree)


@every_tree
@pytest.mark.parametrize("through", [lambda t: pickle.loads(pickle.dumps(t)), copy.copy, copy.deepcopy])
def test_pickle_and_copy(make, through):
    tree = numbered(make())
    same(through(tree), tree)


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


# --- strict settings

FAMILY = {
    "batch": (nj.batch_norm, "N L C", "N L", True),
    "batch evaluated": (nj.batch_norm, "N L C", "N L", False),
    "layer": (nj.layer_norm, "N L C", "L C", None),
    "instance": (nj.instance_norm, "N L C", "L", None),
    "group": (nj.group_norm, "N L C=(G=2 K)", "L K", None),
    "rms": (nj.rms_norm, "N L C", "C", None),
}
every_layer = pytest.mark.parametrize(("norm", "layout", "axis_names", "train"), FAMILY.values(), ids=FAMILY.keys())


def gradient_of(norm, layout, axis_names, train, derivative="vjp", **options):
    """The gradient in x, params and eps of a layer with everything: mask, state, both parameters."""

    def loss(x, params, eps, state, where):
        spec = {"layout": layout, "axis_names": axis_names, "train": train, "derivative": derivative, **options}
        y, new = norm(x, params, state, where=where, eps=eps, **spec)
        # Weights that are no constant, so that no gradient is trivially zero.
        weights = jnp.reshape(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)), y.shape)
        return jnp.sum(y.astype(jnp.float32) * weights), new

    return jax.grad(loss, (0, 1, 2), has_aux=True)


STRICT = [("vjp", False, False), ("vjp", True, True), ("jvp", True, False), ("autodiff", False, True)]


@pytest.mark.parametrize(("derivative", "masked", "x64_on"), STRICT)
@every_layer
def test_no_dtype_or_rank_is_promoted_silently(norm, layout, axis_names, train, derivative, masked, x64_on):
    is_batch = norm is nj.batch_norm
    options = {"running": nj.Ema(0.1, unbiased=True, debias=True)} if is_batch else {}
    call = gradient_of(norm, layout, axis_names, train, derivative, **options)
    where = jax.ShapeDtypeStruct((2, 3, 1), jnp.bool_) if masked else None
    with jax.enable_x64(x64_on), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        params = nj.Affine.init(C=4, zero_centered=True)
        state = nj.BatchStats.init(C=4) if is_batch else None
        eps = jax.ShapeDtypeStruct((), jnp.float32)
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float64)[: 3 if x64_on else 2]:
            x = jax.ShapeDtypeStruct((2, 3, 4), dtype)
            (dx, d_params, d_eps), new = jax.eval_shape(call, x, params, eps, state, where)
            assert (dx.dtype, d_params.scale.dtype, d_eps.dtype) == (dtype, jnp.float32, jnp.float32)
            if is_batch:
                assert [str(leaf.dtype) for leaf in jax.tree.leaves(new)] == ["float32", "float32", "int32", "float32"]


@pytest.mark.parametrize("call", ["merge", "pool", "cumulative", "moments given", "mapped", "decay"])
def test_the_helpers_promote_nothing_silently(call):
    calls = {
        "merge": lambda x, p, s: nj.merge(nj.moments(x, **SPEC), nj.moments(x, where=x > 0, **SPEC)),
        "pool": lambda x, p, s: nj.pool_stats(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), s_named(s)), "device"),
        "cumulative": lambda x, p, s: nj.update(s, nj.moments(x, **SPEC), running=nj.Cumulative(unbiased=True)),
        "moments given": lambda x, p, s: nj.normalize(x, p, moments=nj.moments(x, **SPEC), **SPEC),
        "mapped": lambda x, p, s: jax.vmap(
            lambda x: nj.batch_norm(x, p, s, layout="C", axis_names="data", train=True), axis_name="data"
        )(x),
        "decay": lambda x, p, s: jax.tree.map(jnp.asarray, nj.decay_mask(p)),
    }
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        out = jax.eval_shape(calls[call], jnp.ones((4, 3)), nj.Affine.init(C=3), nj.BatchStats.init(C=3))
    assert all(leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_) for leaf in jax.tree.leaves(out))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@every_layer
def test_constant_and_empty_groups_pass_debug_nans(norm, layout, axis_names, train, eps):
    x = jnp.ones((2, 3, 4))
    where = jnp.stack([jnp.zeros((3, 1), bool), jnp.ones((3, 1), bool)])
    params, state = nj.Affine.init(C=4), nj.BatchStats.init(C=4) if norm is nj.batch_norm else None
    with jax.debug_nans(True):
        call = jax.jit(gradient_of(norm, layout, axis_names, train))
        (dx, d_params, _), _ = call(x, params, jnp.float32(eps), state, where)
    assert dx.shape == x.shape
    assert np.all(np.isfinite(dx))
    assert np.all(np.isfinite(d_params.scale))


@every_layer
def test_no_tracer_leaks(norm, layout, axis_names, train):
    params, state = nj.Affine.init(C=4), nj.BatchStats.init(C=4) if norm is nj.batch_norm else None
    x = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
    where = jax.ShapeDtypeStruct((2, 3, 4), jnp.bool_)
    with jax.checking_leaks():
        for _ in range(2):
            call = gradient_of(norm, layout, axis_names, train)
            (dx, _, _), _ = jax.eval_shape(call, x, params, jnp.float32(1e-5), state, where)
    assert dx.shape == (2, 3, 4)


# --- imports


def python(program: str) -> str:
    """What a fresh interpreter, in which every warning is an error, prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_normjax_imports_neither_flax_nor_optax_and_learns_of_flax_when_it_comes():
    program = """
import sys
import normjax as nj
early = nj.Affine.init(C=3, scale_init=2.0)
print([name for name in ("flax", "optax", "orbax", "chex") if name in sys.modules])
from flax import serialization
late = nj.Affine.init(C=3)
back = serialization.from_bytes(late, serialization.to_bytes(early))
print(type(back).__name__, back.names, back.scale)
"""
    assert python(program).splitlines() == ["[]", "Affine ('C',) [2. 2. 2.]"]


def test_flax_may_be_imported_first():
    program = """
from flax import serialization
import normjax as nj
stats = nj.BatchStats.init(C=2)
print(serialization.from_bytes(stats, serialization.to_bytes(stats)))
"""
    assert python(program) == "BatchStats(mean=float32[2], var=float32[2], count=int32[], weight=float32[2], names='C')"
