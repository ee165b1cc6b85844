"""`Affine`, `BatchStats` and `Moments` there and back: export, Flax, orbax, pickle, copy; and what import brings."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax import export

import normjax as nj
from tests.closeness import close
from tests.trees import SPEC, TREES, every_tree, filled, loss_of, problem, same

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
    shown = "BatchStats(mean=float32[2], var=float32[2], count=int32(0), weight=float32[2], names='C')"
    assert python(program) == shown
