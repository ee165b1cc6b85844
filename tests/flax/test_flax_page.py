"""docs/flax.md: its programs run as written and do what they say, and its tables are measured on Flax and on ours."""

import contextlib
import inspect
import io
import re
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import normjax as nj
from normjax import linen, nnx, reference
from tests.flax.page_calls import MEASURED, REFUSED, linen_call, nnx_call
from tests.flax.rows import KINDS, NNX
from tests.quick import quick_jit

PAGE = (Path(__file__).parents[2] / "docs" / "flax.md").read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = [block for language, block in FENCES if language == "python"]


def tables(heading: str) -> list[list[list[str]]]:
    """The cells of the tables below a heading, their headers and rules left out."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^(?:\|.*\n)+", section, re.MULTILINE)
    return [[[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]] for text in found]


@pytest.fixture(scope="module")
def page():
    """The names that the page's programs define, each run after those above it, and what they print."""
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(block, names)
    return names, printed.getvalue()


def test_what_the_page_says_is_printed_is_printed(page):
    assert page[1] == "".join(block for language, block in FENCES if language == "text")


# --- the two models, before and after


def before(text: str) -> dict:
    """The names that the block with this text defines with the import that the page says stood there before."""
    (block,) = (block for block in BLOCKS if text in block)
    swapped, count = re.subn(r"^from normjax import .* # before: (.*)$", r"\1", block, flags=re.MULTILINE)
    assert count == 1
    names = {"jax": jax, "jnp": jnp, "x": jax.random.normal(jax.random.key(0), (32, 8))}
    exec(swapped, names)
    return names


def near(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), found, wanted)


def test_the_linen_model_is_the_one_before_and_loads_its_checkpoint_both_ways(page):
    theirs, mine = before("class Model"), page[0]
    assert theirs["norms"] is flax_linen
    jax.tree.map(np.testing.assert_array_equal, mine["variables"], theirs["variables"])
    near((mine["y"], mine["updates"]), (theirs["y"], theirs["updates"]))
    x, trained = mine["x"], {"params": theirs["variables"]["params"], **theirs["updates"]}
    for into, out_of in ((mine, theirs), (theirs, mine)):
        saved = flax.serialization.to_bytes(trained)
        loaded = flax.serialization.from_bytes(into["variables"], saved)
        evaluated = [
            names["model"].apply(values, x, train=False) for names, values in ((into, loaded), (out_of, trained))
        ]
        near(*evaluated)


def test_the_nnx_model_is_the_one_before_and_loads_its_checkpoint_both_ways(page):
    theirs, mine = before("class Net"), page[0]
    assert theirs["nnx_norms"] is flax_nnx
    near(mine["y_net"], theirs["y_net"])
    params = (flax_nnx.to_pure_dict(flax_nnx.state(names["net"], flax_nnx.Param)) for names in (mine, theirs))
    jax.tree.map(np.testing.assert_array_equal, *params)
    for made, kept in ((mine, theirs), (theirs, mine)):
        copy = made["Net"](flax_nnx.Rngs(3))
        flax_nnx.update(copy, flax_nnx.state(kept["net"]))
        copy.eval()
        near(copy(mine["x"]), kept["net"](mine["x"]))
    jax.tree.map(np.testing.assert_array_equal, flax_nnx.state(mine["other"]), flax_nnx.state(mine["net"]))


def test_the_norm_taken_out_of_the_checkpoint_is_the_model_s_and_goes_back(page):
    names, _ = page
    _, seen = names["model"].apply(
        names["variables"], names["x"], train=True, mutable=["batch_stats", "intermediates"], capture_intermediates=True
    )
    near(names["y_bn"], seen["intermediates"]["BatchNorm_0"]["__call__"][0])
    back = names["back"]
    near(back["batch_stats"]["BatchNorm_0"], seen["batch_stats"]["BatchNorm_0"])
    near(back["params"]["BatchNorm_0"], names["variables"]["params"]["BatchNorm_0"])


def test_flax_s_statistics_counted_as_one_update_are_kept_by_the_next(page):
    names, _ = page
    batch = nj.moments(names["h"], layout="N C", axis_names="N")
    net, counting = names["net"], flax_nnx.clone(names["counting"])
    assert int(counting.count[...]) == 1
    counting(names["h"])
    _, new = names["module"].apply(
        names["counted"], names["h"], use_running_average=False, mutable=["batch_stats", "batch_counts"]
    )
    for name, now in (("mean", batch.mean), ("var", batch.var)):
        near(getattr(counting, name)[...], 0.9 * getattr(net.norm, name)[...] + 0.1 * now)
        near(new["batch_stats"][name], 0.9 * names["variables"]["batch_stats"]["BatchNorm_0"][name] + 0.1 * now)
    assert set(new["batch_counts"]) == {"count", "weight"}
    forgetful = nnx.BatchNorm(16, running=names["average"], rngs=flax_nnx.Rngs(0))
    flax_nnx.update(forgetful, flax_nnx.state(net.norm))
    forgetful(names["h"])
    near(forgetful.mean[...], batch.mean)


def test_a_scale_of_flax_s_less_1_is_that_of_the_zero_centred_module(page):
    names, _ = page
    near(
        names["centred"](names["h"], use_running_average=True), names["net"].norm(names["h"], use_running_average=True)
    )


@pytest.mark.parametrize(("dtype", "first"), [(None, jnp.float32), (jnp.complex64, jnp.complex64)])
def test_a_complex_dtype_makes_a_stable_carry_of_a_norm_of_complex_x(dtype, first):
    norm, x = nnx.BatchNorm(3, dtype=dtype, rngs=flax_nnx.Rngs(0)), jnp.arange(12.0).reshape(2, 2, 3) + 1j
    assert norm.mean[...].dtype == first
    scan = flax_nnx.scan(lambda norm, x: (norm, norm(x)), in_axes=(flax_nnx.Carry, 0), out_axes=(flax_nnx.Carry, 0))
    if dtype is None:
        with pytest.raises(TypeError, match="carry"):
            scan(norm, x)
        norm(x[0])
        assert norm.mean[...].dtype == jnp.complex64
    norm, _ = scan(norm, x)
    assert (norm.mean[...].dtype, norm.var[...].dtype) == (jnp.complex64, jnp.float32)


# --- replace, weight decay, words


def test_the_frozen_copy_evaluates_and_its_norm_has_nothing_to_train(page):
    names, _ = page
    near(names["y_frozen"], names["net"](names["x"]))
    assert set(flax_nnx.state(names["frozen"], flax_nnx.Param)) == {"dense", "head"}


@pytest.mark.parametrize(
    ("axes", "right"), [((1, 2, 3), True), ((0, 2, 3), True), ((2, 3), False), ((1, 2, -1), False)]
)
def test_a_group_norm_is_replaced_with_the_axes_that_the_page_says(axes, right):
    norm = flax_nnx.GroupNorm(4, 2, reduction_axes=axes, rngs=flax_nnx.Rngs(0))
    if right:
        assert len(nnx.replace(norm)) == 1
    else:
        with pytest.raises(ValueError, match="reduction_axes"):
            nnx.replace(norm)


def test_the_table_of_replace_has_every_value():
    (rows,) = tables("A model that exists")
    for (value, _), options in zip(rows, ({}, {"axis_name": "data"}, {"num_groups": 2}, {}), strict=True):
        norm = flax_nnx.BatchNorm(4, rngs=flax_nnx.Rngs(0))
        norm.mean.set_value(jnp.ones(4))
        (change,) = nnx.replace(norm, eval(value.strip("`")), **options)
        assert change.before == "flax.nnx.BatchNorm(4)"


def ones(params):
    return jax.tree.map(jnp.ones_like, params)


def test_the_optimisers_of_the_page_decay_all_but_the_norms(page):
    names, _ = page

    @quick_jit
    def step(state):
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.replace(params=ones(state.params)).apply_gradients(grads=zeros).params

    changed = step(names["train_state"])
    assert len(changed) == 5
    for path, leaf in jax.tree_util.tree_leaves_with_path(changed):
        assert np.all(leaf < 1) == ("Dense" in path[0].key), path

    @flax_nnx.jit
    def nnx_step(net, optimizer):
        params = flax_nnx.state(net, flax_nnx.Param)
        flax_nnx.update(net, ones(params))
        optimizer.update(net, jax.tree.map(jnp.zeros_like, params))

    net = flax_nnx.clone(names["net"])
    nnx_step(net, names["optimizer"])
    for path, leaf in flax_nnx.to_flat_state(flax_nnx.state(net, flax_nnx.Param)):
        assert np.all(leaf.get_value() < 1) == (path[0] != "norm"), path


@pytest.mark.parametrize("library", ["flax", "normjax"])
def test_the_mask_of_a_module_spares_its_norms(library, page):
    net = flax_nnx.Sequential(
        flax_nnx.Linear(2, 3, rngs=flax_nnx.Rngs(0)),
        *(
            getattr(NNX[library], kind)(4, rngs=flax_nnx.Rngs(0), **({"num_groups": 2} if kind == "GroupNorm" else {}))
            for kind in KINDS
        ),
    )
    mask = nj.decay_mask(net)
    assert jax.tree.leaves(mask.layers[0]) == [True, True]
    for layer in mask.layers[1:]:
        assert not any(jax.tree.leaves(layer))
    optax.adamw(0.1, mask=nj.decay_mask).init(flax_nnx.state(net, flax_nnx.Param))


def test_the_ghost_batches_of_the_page_are_each_normalised_by_itself(page):
    names, _ = page
    h = np.asarray(names["net"].dense(names["x"])).reshape(4, 8, 16)
    wanted = reference.normalize(h, layout="B n C", axis_names="n").reshape(32, 16)
    np.testing.assert_allclose(names["y_ghost"], wanted, atol=1e-5)


# --- what changes: each row, by either library


def numbers(text: str) -> np.ndarray:
    if found := re.fullmatch(r"(\S+) seven times", text):
        return np.full(7, float(found[1]))
    return np.array([float(part) for part in text.split(", ")])


@pytest.mark.parametrize("row", tables("What changes")[0], ids=lambda row: row[0][:30])
def test_a_number_of_what_changes_is_what_comes_out(row):
    text, theirs, mine = row
    (measure,) = (measure for part, measure in MEASURED.items() if part in text)
    for library, said in (("flax", theirs), ("normjax", mine)):
        for found in measure(library):
            np.testing.assert_allclose(np.ravel(found).astype(float), numbers(said), rtol=0, atol=6e-5)


def test_every_number_of_what_changes_is_measured():
    assert len(tables("What changes")[0]) == len(MEASURED)
    assert len(tables("What changes")[1]) == len(REFUSED)


@pytest.mark.parametrize("call", [linen_call, nnx_call])
def test_flax_s_layer_norm_with_its_other_variance_is_as_the_page_says(call):
    x = jnp.array([[40000.0, 40001, 40002, 40003]])
    right = call("flax", "LayerNorm", x, use_fast_variance=False, epsilon=1e-5)
    near(right, call("normjax", "LayerNorm", x, epsilon=1e-5))
    (said,) = re.findall(r"and the second (\S+);", PAGE)
    constant = call("flax", "LayerNorm", jnp.full((1, 7), 1e6), use_fast_variance=False)
    np.testing.assert_allclose(constant, np.full((1, 7), float(said)), rtol=0, atol=6e-5)
    accepted = call("normjax", "LayerNorm", x, use_fast_variance=True, epsilon=1e-5)
    np.testing.assert_array_equal(accepted, call("normjax", "LayerNorm", x, use_fast_variance=False, epsilon=1e-5))


@pytest.mark.parametrize("row", tables("What changes")[1], ids=lambda row: row[0][:30])
def test_what_one_of_both_refuses_the_other_takes(row):
    text, theirs, mine = row
    (both_modules,) = (modules for part, modules in REFUSED.items() if part in text)
    for library, said in (("flax", theirs), ("normjax", mine)):
        for call in both_modules:
            if said == "works":
                jax.eval_shape(lambda call=call, library=library: call(library))
                continue
            with pytest.raises(Exception) as error:  # noqa: PT011
                jax.eval_shape(lambda call=call, library=library: call(library))
            assert said.strip("`") in {kind.__name__ for kind in type(error.value).__mro__}


@pytest.mark.parametrize(
    ("row", "module"), [("a batch of one", 0), ("a batch of one", 1)] + [("(N, C)", i) for i in range(4)]
)
def test_flax_s_groups_of_one_entry_give_the_bias(row, module):
    np.testing.assert_array_equal(quick_jit(lambda: REFUSED[row][module]("flax"))(), 0)


# --- the tables of names


@pytest.mark.parametrize(("module", "call"), tables("Layers")[0], ids=lambda text: text[:40])
def test_a_layer_and_its_call_are_the_same(module, call, rng):
    kind, arguments = re.fullmatch(r"`(\w+)\((.*)\)`", module).groups()
    function, layout, axis_names = re.fullmatch(r'`(\w+)\(layout="(.*)", axis_names="(.*)"\)`', call).groups()
    x = jnp.asarray(rng.normal(size=(2, 3, 3, 8) if "N C H W" not in layout else (2, 8, 3, 3)), jnp.float32)
    settings = eval(f"dict({arguments})")
    names = {"H": 3, "W": 3, "C": 8} if "feature_axes" in settings else {"C": 8}
    params = nj.Affine.init(**names, bias=kind != "RMSNorm")
    eps = getattr(linen, kind)().epsilon
    options = {"layout": layout, "axis_names": axis_names, "eps": eps, "train": True}
    pure = lambda x: getattr(nj, function)(x, params, **options)[0]  # noqa: E731
    near(*quick_jit(lambda x: (pure(x), linen_call("flax", kind, x, **settings)))(x))


def defaults(argument: str) -> dict[tuple[str, str], object]:
    """By library and class: those of the constructors, or of the calls, that have the argument."""
    found = {}
    for name, library in (("linen", flax_linen), ("nnx", flax_nnx)):
        for kind in KINDS:
            cls = getattr(library, kind)
            for function in (cls.__init__, cls.__call__):
                parameter = inspect.signature(function).parameters.get(argument)
                if parameter is not None and (function is cls.__init__ or argument == "mask"):
                    found[name, kind] = parameter.default
    return found


WORDS = {"None": None, "True": True, "False": False, "float32": jnp.float32}


def value(text: str):
    word = re.match(r"[^,;: ]+", text)[0].strip("`")
    return WORDS[word] if word in WORDS else float(word)


@pytest.mark.parametrize("row", tables("Arguments")[0], ids=lambda row: row[0])
def test_a_default_of_the_table_is_flax_s(row):
    arguments = re.findall(r"`(\w+)`", row[0])
    if row[1] == "ones, zeros":
        for kind in KINDS[:2]:
            for argument, number in zip(arguments, (1, 0), strict=True):
                for init in (defaults(argument)["linen", kind], defaults(argument)["nnx", kind]):
                    np.testing.assert_array_equal(init(jax.random.key(0), (2,), jnp.float32), number)
        return
    general, *special = row[1].split("; ")
    parts = general.split(", ") if len(arguments) > 1 and ", " in general else [general] * len(arguments)
    for argument, text in zip(arguments, parts, strict=True):
        found = defaults(argument)
        assert found
        for (library, kind), default in found.items():
            wanted = [other for other in special if other.split(":")[0].strip("`") in (library, kind)]
            assert default == value(wanted[0].split(": ", 1)[1] if wanted else text), (argument, library, kind)


def test_the_table_has_every_argument_of_flax_s_that_is_not_nnx_s_own():
    told = {name for row in tables("Arguments")[0] for name in re.findall(r"`(\w+)`", row[0])}
    taken = {name for kind in KINDS for name in inspect.signature(getattr(flax_linen, kind).__init__).parameters}
    assert told - {"mask"} == taken - {"self", "parent", "name"}


def test_the_calls_in_the_table_of_arguments_are_code_that_runs():
    names = {"Affine": nj.Affine, "Ema": nj.Ema, "float32": jnp.float32}
    found = [
        text for row in tables("Arguments")[0] for text in re.findall(r"`(?:\w+=)?((?:Affine|Ema)[^`]*\))`", row[3])
    ]
    assert len(found) == 5
    assert all(eval(text, names) is not None for text in found)
    assert nj.Ema.flax(0.99).new_weight == pytest.approx(0.01)
    assert {
        inspect.signature(getattr(nj, name)).parameters["eps"].default for name in nj.__all__ if "_norm" in name
    } == {1e-5}
    for name in ("layout", "axis_names", "running", "zero_centered", "derivative"):
        assert name in inspect.signature(nnx.BatchNorm.__init__).parameters
        assert name in inspect.signature(linen.BatchNorm.__init__).parameters
