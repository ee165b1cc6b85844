"""The arguments, defaults and attributes of the installed Flax, and no arithmetic."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx as flax_nnx

import normjax
from normjax import linen, nnx
from tests.flax.rows import KINDS, LINEN, NNX

OURS = {"layout": None, "axis_names": None, "zero_centered": False, "derivative": "vjp"}
every_kind = pytest.mark.parametrize("kind", KINDS)


def ours(kind: str) -> dict:
    return OURS | ({"running": None} if kind == "BatchNorm" else {})


def signature(call) -> dict[str, tuple]:
    """Name, kind and default of each parameter, in order."""
    parameters = inspect.signature(call).parameters
    return {name: (parameter.kind, parameter.default) for name, parameter in parameters.items()}


def same_but_for_ours(mine: dict, theirs: dict, added: dict) -> None:
    assert list(mine)[: len(theirs)] == list(theirs)
    assert {name: mine[name] for name in theirs} == theirs
    extra = {name: mine[name] for name in mine if name not in theirs}
    assert extra == {name: (inspect.Parameter.KEYWORD_ONLY, default) for name, default in added.items()}


@every_kind
def test_a_linen_constructor_is_flax_s_with_our_arguments_keyword_only(kind):
    mine, theirs = (signature(getattr(LINEN[library], kind)) for library in ("normjax", "flax"))
    same_but_for_ours(mine, theirs, ours(kind))


@every_kind
def test_the_fields_of_a_linen_module_are_flax_s(kind):
    mine, theirs = (
        {field.name: field.default for field in dataclasses.fields(getattr(LINEN[library], kind))}
        for library in ("normjax", "flax")
    )
    assert mine == theirs | ours(kind)
    assert [name for name in mine if name in theirs] == list(theirs)


@every_kind
def test_an_nnx_constructor_is_flax_s_with_our_arguments_keyword_only(kind):
    mine, theirs = (signature(getattr(NNX[library], kind).__init__) for library in ("normjax", "flax"))
    same_but_for_ours(mine, theirs, ours(kind))


@every_kind
@pytest.mark.parametrize("libraries", [LINEN, NNX], ids=["linen", "nnx"])
def test_a_call_takes_flax_s_arguments(kind, libraries):
    mine, theirs = (signature(getattr(libraries[library], kind).__call__) for library in ("normjax", "flax"))
    assert mine == theirs
    assert "mask" in mine


@every_kind
def test_an_nnx_module_has_the_attributes_of_flax_s(kind):
    mine, theirs = (
        vars(
            getattr(NNX[library], kind)(8, **({"num_groups": 2} if kind == "GroupNorm" else {}), rngs=flax_nnx.Rngs(0))
        )
        for library in ("normjax", "flax")
    )
    values = {
        name for name, value in theirs.items() if not name.startswith("_") and not isinstance(value, flax_nnx.Variable)
    }
    assert {name: mine[name] for name in values} == {name: theirs[name] for name in values}
    for name, value in theirs.items():
        assert isinstance(value, flax_nnx.Variable) == isinstance(mine[name], flax_nnx.Variable), name


def test_the_view_of_a_batch_norm_takes_flax_s_arguments():
    assert signature(nnx.BatchNorm.set_view) == signature(flax_nnx.BatchNorm.set_view)


def test_the_modules_hold_flax_s_class_names():
    assert set(linen.__all__) - {"fold"} == set(KINDS)
    assert set(KINDS) <= set(nnx.__all__)
    for kind in KINDS:
        for libraries in (LINEN, NNX):
            assert getattr(libraries["normjax"], kind).__name__ == getattr(libraries["flax"], kind).__name__ == kind


# --- no arithmetic

MODULES = ("linen", "nnx", "_nnx_batch")
ALLOWED = {"jnp": {"float32"}, "jax": {"Array", "numpy"}, "lax": set(), "np": set()}
METHODS = {name for name in dir(jax.Array) if not name.startswith("_")}


def arithmetic(source: str) -> list[str]:
    """What in a module computes: operators on values, array methods, and anything of jax, jnp or lax but dtypes."""
    tree = ast.parse(source)
    hints = [getattr(node, field, None) for node in ast.walk(tree) for field in ("annotation", "returns")]
    hinting = {id(part) for hint in hints if hint is not None for part in ast.walk(hint)}
    return [ast.unparse(node) for node in ast.walk(tree) if id(node) not in hinting and computes(node)]


def computes(node: ast.AST) -> bool:
    match node:
        case ast.BinOp():
            return True
        case ast.AugAssign(value=value):
            return not isinstance(value, ast.Dict)
        case ast.UnaryOp(op=op, operand=operand):
            return not isinstance(op, ast.Not) and not isinstance(operand, ast.Constant)
        case ast.Compare(ops=ops):
            return not all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn | ast.Eq) for op in ops)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return attribute not in ALLOWED.get(name, {attribute})
        case ast.ImportFrom(module=module):
            return (module or "").split(".")[0] in ("jax", "numpy")
        case ast.Import(names=names):
            return any(alias.name in ("numpy", "jax.lax") for alias in names)
        case ast.Call(func=ast.Attribute(attr=attribute)):
            return attribute in METHODS
    return False


@pytest.mark.parametrize("name", MODULES)
def test_a_module_holds_no_arithmetic(name):
    source = (Path(normjax.__file__).parent / f"{name}.py").read_text()
    assert arithmetic(source) == []


@pytest.mark.parametrize(
    "planted",
    [
        "y = x - mean",
        "y *= scale",
        "y = -x",
        "y = jnp.sqrt(var)",
        "y = jax.lax.rsqrt(var)",
        "y = x.mean(0)",
        "y = x.astype(dtype)",
        "from jax import lax",
        "import numpy as np",
        "y = x @ w",
        "y = x > 0",
    ],
)
def test_planted_arithmetic_is_found(planted):
    assert arithmetic(f"import jax.numpy as jnp\n{planted}\n")


# --- the extra


@pytest.mark.parametrize("part", ["linen", "nnx"])
def test_without_flax_the_import_says_which_pip_install_brings_it(part):
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "flax" else find(name, package)
import normjax.{part}
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(
        rf'^ModuleNotFoundError: normjax\.{part} needs flax: pip install "normjax\[flax\]"', ran.stderr, re.M
    )
