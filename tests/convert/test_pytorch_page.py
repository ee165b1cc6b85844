"""docs/pytorch.md: its programs run as written and do what PyTorch did, and its numbers are those that are measured."""

import contextlib
import io
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.convert import from_torch
from tests.convert.common import EVALUATION, GOLDEN, STATISTICS, TORCH, call, close
from tests.quick import quick_jit

FILE = Path(__file__).parents[2] / "docs" / "pytorch.md"
PAGE = FILE.read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TORCHS = [block for language, block in FENCES if block.startswith("import torch\n")]  # golden/make.py runs it
BLOCKS = [block for language, block in FENCES if language == "python" and block not in TORCHS]


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, its header and rule left out."""
    lines = PAGE.split(f"## {heading}\n", 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0].split("\n")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page's programs define, each run after those above it, and the lines that they print."""
    folder, names, printed = tmp_path_factory.mktemp("page"), {}, io.StringIO()
    shutil.copy(GOLDEN / "model.safetensors", folder)
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(block, names)
    return names, printed.getvalue().splitlines()


def test_pytorchs_program_is_the_one_whose_checkpoint_is_kept():
    (block,) = TORCHS
    compile(block, "docs/pytorch.md", "exec")
    assert 'save_file(model.state_dict(), "model.safetensors")' in block


def test_the_model_of_the_page_evaluates_and_trains_as_in_pytorch(page):
    names, _ = page
    golden = TORCH["page"]
    x = np.asarray(golden["x"], np.float32)
    evaluated, trained = (
        quick_jit(lambda x, train=train: names["model"](x, names["params"], names["state"], train))
        for train in (False, True)
    )
    y, state = evaluated(x)
    close(y, golden["evaluation"], m=16)
    assert int(state.count) == 20
    y, state = trained(x)
    close(y, golden["training"], m=16)
    close(state.mean, golden["after 1"]["running_mean"], m=8)
    close(state.var, golden["after 1"]["running_var"], m=8)
    assert int(state.count) == golden["after 1"]["num_batches_tracked"]


def test_the_module_goes_on_as_the_pure_function_does(page, rng):
    names, _ = page
    norm, bn = names["norm"], names["bn"]
    x = np.asarray(rng.normal(2.0, 3.0, (8, 16)), np.float32)
    options = {"layout": "N C", "axis_names": "N", "train": True, "running": bn.running, "eps": bn.eps}
    y, state = nj.batch_norm(x, bn.params, bn.state, **options)
    np.testing.assert_allclose(norm(x), y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(norm.mean.get_value(), state.mean, rtol=1e-6)
    np.testing.assert_allclose(norm.var.get_value(), state.var, rtol=1e-6)


def test_what_the_page_says_is_printed_is_printed(page):
    _, printed = page
    said = [line.split("#", 1)[1].strip() for block in BLOCKS for line in block.splitlines() if "print(bn" in line]
    (error,) = (block for language, block in FENCES if language == "text")
    assert printed == [*said, *error.splitlines()]


def test_the_file_gives_the_layer_that_its_arrays_give(page):
    names, _ = page
    by_arrays = from_torch(names["weights"], prefix="1.")
    for leaf, right in zip(jax.tree.leaves(names["bn"][:2]), jax.tree.leaves(by_arrays[:2]), strict=True):
        np.testing.assert_array_equal(leaf, right)


# --- the tables


def calls() -> list[tuple[str, str]]:
    return [(row[0].strip("`"), text) for row in table("Layers") for text in re.findall(r"`(\w+\([^`]*\))`", row[1])]


@pytest.mark.parametrize(("layer", "text"), calls())
def test_a_call_of_the_table_is_one_that_works(layer, text):
    function, layout, axis_names = re.fullmatch(r'(\w+)\(layout="(.*)", axis_names="(.*)"\)', text).groups()
    rank = len(re.sub(r"\(.*\)", "", layout).split())
    names = re.findall(r"[A-Z]+(?=[ =]|$)", re.sub(r"\(.*?\)", "", layout))
    kept = [name for name in names if name in ("C", "D")][:1] if "LayerNorm((" not in layer else axis_names.split()
    params = nj.Affine.init(**dict.fromkeys(kept, 8))
    options = {"layout": layout, "axis_names": axis_names, "train": True}
    state = nj.BatchStats.init(C=8) if "Batch" in layer or "track" in layer else None
    apply = lambda x: getattr(nj, function)(x, params, state, **options)  # noqa: E731
    if "data" in axis_names:
        apply = jax.vmap(apply, axis_name="data", out_axes=(0, None))
        rank += 1
    y, new = jax.eval_shape(apply, np.zeros((8,) * rank, np.float32))
    assert y.shape == (8,) * rank
    assert (new is None) == (state is None)


@pytest.mark.parametrize(
    ("layer", "layout", "arguments"),
    [
        ("BatchNorm1d", "N C", {}),
        ("BatchNorm1d", "N C L", {}),
        ("BatchNorm2d", "N C H W", {}),
        ("InstanceNorm2d", "N C H W", {}),
        ("InstanceNorm2d(track_running_stats=True)", "N C H W", {"track_running_stats": True}),
        ("GroupNorm(G, C)", "N C H W", {"num_groups": 4}),
    ],
)
def test_the_calls_of_the_table_are_those_that_were_compared_with_pytorch(layer, layout, arguments):
    case = {"class": layer.split("(")[0], "layout": layout, "arguments": arguments}
    function, layout, axis_names = call(case)
    texts = [text for name, text in calls() if name == layer]
    assert f'{function}(layout="{layout}", axis_names="{axis_names}")' in texts


def test_the_defaults_of_the_table_are_pytorchs_and_those_of_from_torch():
    rows = {re.sub("`", "", row[0]): row[1] for row in table("Arguments")}
    defaults = TORCH["defaults"]
    assert rows["momentum"] == "0.1"
    assert {kind["momentum"] for kind in defaults.values() if "momentum" in kind} == {0.1}
    assert rows["eps"] == "1e-5"
    assert {kind["eps"] for name, kind in defaults.items() if name != "RMSNorm"} == {1e-5}
    assert rows["eps of RMSNorm"] == "`None`"
    assert defaults["RMSNorm"]["eps"] is None
    for argument in ("affine", "track_running_stats"):
        row = next(row for name, row in rows.items() if name.split(", ")[0] == argument)
        assert row == "`True`; `InstanceNorm`: `False`"
        found = {name: kind[argument] for name, kind in defaults.items() if argument in kind}
        assert found.pop("InstanceNorm1d") is False
        assert set(found.values()) == {True}
    assert rows["bias"] == "`True`"
    assert {kind["bias"] for kind in defaults.values() if "bias" in kind} == {True}
    layer = from_torch({"weight": np.ones(3), "bias": np.ones(3)})
    assert (layer.running, layer.eps) == (nj.Ema.torch(0.1), 1e-5)


@pytest.mark.parametrize("row", table("Arguments"), ids=lambda row: row[0])
def test_what_the_table_gives_for_an_argument_is_code_that_runs(row):
    names = {"Affine": nj.Affine, "BatchStats": nj.BatchStats, "Ema": nj.Ema, "Cumulative": nj.Cumulative}
    names |= {"weight": 1.0, "bias": 0.0, "None": None}
    for text in re.findall(r"`([^`]*\))`", row[3]):
        if "from_torch" not in text:
            assert eval(re.sub(r"^\w+=(?=\w+[.(])", "", text), names) is not None
    if row[0].startswith("`momentum=None` of batch"):
        assert nj.Ema.torch(None) == nj.Cumulative(by="updates", unbiased=True)
    if row[0] == "`eps` of `RMSNorm`":
        single, double = (from_torch({"weight": np.ones(2, dtype)}, eps=None).eps for dtype in ("float32", "float64"))
        assert (f"{single:.3g}", f"{double:.2g}") == ("1.19e-07", "2.2e-16")
        assert row[2].replace("e-7", "e-07") == f"{single:.3g}, in half precision too; {double:.2g} for float64"


def mean_after(running, state, batch: float) -> float:
    return float(nj.update(state, nj.Moments(batch, 4.0, 8.0), running=running).mean)


def size_of(x, family: str, eps: float) -> float:
    return float(getattr(nj, family)(jnp.array([x, -x]), layout="D", axis_names="D", eps=eps)[0][0])


def measured(mistake: str) -> tuple[float, float]:
    """What is right, and what comes of the mistake."""
    new = nj.BatchStats.init()
    if "the share that is kept" in mistake:
        return mean_after(nj.Ema.torch(0.1), new, 10.0), mean_after(nj.Ema.flax(0.1), new, 10.0)
    if "running variance" in mistake:
        batch = nj.moments(jnp.array([0.0, 0.0, 6.0]), layout="N", axis_names="N")
        return tuple(float(nj.update(new, batch, running=r).var) for r in (nj.Ema.torch(1.0), nj.Ema(1.0)))
    if "without its counter" in mistake:
        seen = nj.BatchStats(1.0, 2.0, jnp.int32(3), jnp.float32(3), ())
        lost = nj.BatchStats(1.0, 2.0, jnp.int32(0), jnp.float32(0), ())
        return tuple(mean_after(nj.Ema.torch(None), state, 5.0) for state in (seen, lost))
    if "outside the root" in mistake:
        return size_of(1e-3, "layer_norm", 1e-5), 1e-3 / (1e-3 + 1e-5)
    if "for `RMSNorm`'s `None`" in mistake:
        own = from_torch({"weight": np.ones(2, "f")}, names="D", eps=None).eps
        return size_of(1e-3, "rms_norm", own), size_of(1e-3, "rms_norm", 1e-5)
    raise AssertionError(mistake)


@pytest.mark.parametrize("row", table("What a mistake costs"), ids=lambda row: row[0])
def test_a_number_of_the_table_of_mistakes_is_what_is_measured(row):
    mistake, *said = row
    for text, found in zip(said, measured(mistake), strict=True):
        digits = len(text.split(".")[1])
        assert text.removeprefix("±") == f"{found:.{digits}f}"


def test_the_numbers_in_the_text_are_those_of_pytorchs_script():
    flat = " ".join(PAGE.split())
    off = TORCH["bfloat16 off by"]
    assert f"off by {100 * off['0.1']:.1f} % with `momentum=0.1`, and by {100 * off['0.01']:.0f} % with 0.01" in flat
    assert f"The script's {len(TORCH['cases'])} layers" in flat
    assert f"within {EVALUATION:.0e}".replace("e-0", "e-") in flat
    assert f"within {STATISTICS:.0e}".replace("e-0", "e-") in flat
    assert f"version {'.'.join(TORCH['torch'].split('.')[:2])}" in flat


def test_the_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (FILE.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", PAGE):
        text = (FILE.parent / target).read_text()
        headings = [re.sub(r"[^\w -]", "", line.lstrip("# ")).lower() for line in text.splitlines() if line[:1] == "#"]
        assert anchor in [heading.replace(" ", "-") for heading in headings]
