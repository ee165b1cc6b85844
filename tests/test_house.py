"""The house: what the README says is so, and the package needs what it says it needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from benchmarks import accuracy
from benchmarks.stress import inputs
from normjax._extras import require

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def table_after(heading: str) -> list[list[str]]:
    """The cells of the first Markdown table below a heading or marker, its header and rule left out."""
    lines = README.split(heading, 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0].split("\n")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.fixture(scope="module")
def readme():
    """``readme(text)``: the names defined once the README's Python block with this text has run, all run in order."""
    names: dict = {}
    snapshots = []
    for block in blocks("python"):
        exec(block, names)
        snapshots.append((block, dict(names)))

    def after(text: str) -> dict:
        (found,) = (defined for block, defined in snapshots if text in block)
        return found

    return after


def test_the_readme_opens_with_one_sentence_then_two_commands():
    opening = README.split("\n\n")
    assert opening[0] == "# normjax"
    assert opening[1].count(".") == 1
    assert opening[1].endswith(".")
    assert [part.startswith("```bash\n") and part.count("\n") == 2 for part in opening[2:5]] == [True, True, False]
    job, tests = (part.split("\n")[1] for part in opening[2:4])
    assert job.endswith(" && .venv/bin/normjax train digits")
    assert ".venv/bin/python -m pytest" in tests


def test_the_first_example_has_at_most_fifteen_lines():
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 15


def test_the_first_example_learns_and_its_running_statistics_serve_evaluation(readme):
    names = readme("import normjax as nj")
    trained, _ = names["loss"](names["params"], names["state"])
    untrained, _ = names["loss"](nj.Affine.init(C=16), names["state"])
    evaluated = jnp.mean((names["y"] - jnp.tanh(names["x"])) ** 2)
    assert trained < untrained / 2
    # 50 updates by the same batch leave 0.9⁵⁰ = 0.5 % of the start values.
    np.testing.assert_allclose(evaluated, trained, rtol=0.05)


def test_the_flax_example_learns(readme):
    losses = readme("class Net(nnx.Module)")["nnx_losses"]
    assert losses[-1] < losses[0] - 0.01


def test_the_checkpoint_of_the_readme_is_taken_as_pytorch_means_it(readme):
    names = readme("from_torch")
    assert names["ported"].running == nj.Ema.torch(0.1)
    np.testing.assert_allclose(names["y"], names["x"] / np.sqrt(1 + 1e-5), rtol=1e-6)


def test_the_synchronised_example_equals_the_whole_batch(readme):
    names = readme("sync_batch_norm")
    whole, _ = nj.normalize(names["x"], names["params"], layout="N H W C", axis_names="N H W")
    np.testing.assert_allclose(names["y_sync"].reshape(whole.shape), whole, atol=1e-5)


def test_the_loops_on_many_devices_take_the_same_steps_and_learn(readme):
    names = readme("jax.shard_map")
    # Of 30 steps in float32; the two reduce in another order.
    np.testing.assert_allclose(names["shard_map_losses"], names["pmap_losses"], rtol=1e-3)
    assert names["pmap_losses"][-1] < 0.6 * names["pmap_losses"][0]


def test_the_masked_example_rests_on_the_included_entries(readme):
    names = readme("valid =")
    included = nj.moments(names["x"][:20], layout="N H W C", axis_names="N H W")
    expected = nj.update(names["state"], included)
    np.testing.assert_allclose(names["masked_state"].mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(names["masked_state"].var, expected.var, rtol=1e-6)


def test_the_micro_batches_of_the_readme_equal_the_whole_batch(readme):
    names = readme("nj.merge")
    direct = nj.moments(names["x"], layout="N H W C", axis_names="N H W")
    for name in ("mean", "var", "count"):
        np.testing.assert_allclose(getattr(names["whole"], name), getattr(direct, name), rtol=1e-6)
    y, _ = nj.normalize(names["x"], names["params"], layout="N H W C", axis_names="N H W")
    np.testing.assert_allclose(names["y_half"], y[:10], atol=1e-5)


def test_the_cast_first_recipe_stays_in_bfloat16(readme):
    assert readme("bfloat16")["y_half"].dtype == jnp.bfloat16


def test_the_optimiser_example_decays_the_kernel_alone(readme):
    updates = readme("mask=nj.decay_mask)\nupdates")["updates"]
    assert float(jnp.max(updates["dense"]["kernel"])) < 0
    for spared in (updates["dense"]["bias"], updates["norm"].scale, updates["norm"].bias):
        np.testing.assert_array_equal(spared, 0)


def test_after_training_the_readme_has_exact_statistics_nothing_to_report_and_no_norm_left(readme):
    names = readme("from normjax.diagnose import diagnose")
    before = np.asarray(names["net"].conv(names["images"]), np.float64)
    np.testing.assert_allclose(names["exact"]["norm"]["mean"][...], before.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(names["exact"]["norm"]["var"][...], before.var((0, 1, 2)), rtol=1e-6)
    assert names["report"].findings == ()
    assert [(row.norm, row.layer) for row in names["what_became"]] == [("norm", "conv")]
    logits, folded = names["net"](names["images"]), names["folded"](names["images"])
    np.testing.assert_allclose(folded, logits, atol=1e-5)


@pytest.mark.parametrize("row", table_after("## The family"), ids=lambda row: row[0])
def test_a_row_of_the_family_table_is_a_call_that_works(row, rng):
    _, _, call, state, where = row
    name, layout, axis_names = re.fullmatch(r'`(\w+)\(layout="(.*)", axis_names="(.*)"\)`', call).groups()
    x = jnp.asarray(rng.normal(size=(8, 4, 4, 16)), jnp.float32)
    given = nj.BatchStats.init(C=16) if state == "`BatchStats`" else None

    @jax.jit
    def apply(x):
        return getattr(nj, name)(x, nj.Affine.init(C=16), given, layout=layout, axis_names=axis_names, train=True)

    if "data" in axis_names:
        y, new = jax.jit(jax.vmap(apply, axis_name="data", out_axes=(0, None)))(x[None])
    else:
        y, new = apply(x)
    assert y.size == x.size
    assert (new is not None) == (given is not None)
    assert given is None or int(new.count) == 1
    assert (ROOT / re.search(r"\((.*)\)", where).group(1)).is_file()


@pytest.mark.parametrize(("train", "use_batch_stats", "what", "state"), table_after("## Training and evaluation"))
def test_a_row_of_the_mode_table_is_what_happens(train, use_batch_stats, what, state, rng):
    x = jnp.asarray(rng.normal(size=(8, 3)) + 5, jnp.float32)
    given = nj.BatchStats.init(C=3)

    @jax.jit
    def apply():
        flags = {"train": "True" in train, "use_batch_stats": "True" in use_batch_stats}
        return nj.batch_norm(x, None, given, layout="N C", axis_names="N", **flags)

    if "error" in what:
        with pytest.raises(ValueError, match="use_batch_stats"):
            apply()
        return
    y, new = apply()
    assert (abs(float(jnp.mean(y))) < 1e-5) == ("the batch" in what)
    assert int(new.count) == (state == "updated")


def said_by_jax(call, kind) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value).split("\n")[0].rstrip(".")


@pytest.mark.parametrize("run", [lambda f, x: f(x), lambda f, x: jax.jit(f).lower(x)], ids=["eager", "jit"])
@pytest.mark.parametrize("page", ["README.md", "docs/per_example.md"])
def test_a_page_has_what_jax_says_where_forward_mode_needs_a_word(page, run):
    text, x = " ".join((ROOT / page).read_text().split()), jnp.ones((4, 3))

    def tangent(x, derivative):
        norm = lambda x: jnp.sum(nj.layer_norm(x, layout="N D", axis_names="D", derivative=derivative)[0] ** 3)  # noqa: E731
        return jax.jvp(norm, (x,), (x,))[1]

    for take, kind in ((tangent, TypeError), (jax.grad(tangent), NotImplementedError)):
        said = said_by_jax(lambda: run(lambda x: take(x, "vjp"), x), kind)  # noqa: B023
        assert f'"{said}"' in text
        run(lambda x: take(x, "jvp"), x)  # noqa: B023


@pytest.mark.parametrize("shape", [(8, 16), (256, 256)], ids=str)
def test_the_readme_has_what_jax_says_of_a_pullback_transposed_and_both_ways_out_work(shape):
    x = jnp.ones(shape)

    def tangent(x, derivative, by):
        norm = lambda x: nj.layer_norm(x, layout="N D", axis_names="D", derivative=derivative)[0]  # noqa: E731
        pullback = jax.vjp(norm, x)[1]
        return jax.linear_transpose(pullback, x)((x,)) if by == "transpose" else jax.vjp(pullback, x)[1]((x,))

    said = said_by_jax(lambda: jax.eval_shape(lambda x: tangent(x, "vjp", "transpose"), x), NotImplementedError)
    assert f'("{said}")' in " ".join(README.split())
    for derivative, by in (("jvp", "transpose"), ("vjp", "vjp")):
        assert jax.eval_shape(lambda x: tangent(x, derivative, by), x)[0].shape == shape  # noqa: B023


def test_every_name_of_normjax_that_the_readme_uses_exists():
    for name in set(re.findall(r"\bnj\.(\w+)", README)):
        assert hasattr(nj, name), name


def test_every_link_of_the_readme_leads_to_a_file():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_accuracy_table_of_the_readme_has_the_rows_that_the_command_prints():
    printed = accuracy.table().splitlines()
    written = README.split("<!-- accuracy -->", 1)[1].split("<!-- /accuracy -->", 1)[0].strip().splitlines()
    assert written[:2] == printed[:2]
    labels = [[line.split(" | ")[:2] for line in lines[2:]] for lines in (written, printed)]
    assert labels[0] == labels[1]
    # PyTorch's column is a file: its digits do not depend on this machine.
    assert [line.split(" | ")[-1] for line in written] == [line.split(" | ")[-1] for line in printed]


@pytest.mark.parametrize("stress", inputs(), ids=lambda stress: f"{stress.family}: {stress.name}")
def test_normjax_is_within_its_bound_on_every_stress_input(stress):
    y = accuracy.by_normjax(stress.x, family=stress.family)
    if np.abs(stress.x).max() < 1e19:
        # The contract: 1e-6, and 1e-5 on the inputs built against the first eighth that the statistics start from.
        built_against = "first eighth" in stress.name or "one entry" in stress.name
        assert stress.error(y) <= (1e-5 if built_against else 1e-6)
    else:
        # Squares that overflow float32 give the right number or NaN, never silent zeros.
        assert np.isnan(y).all() or stress.error(y) <= 1e-6


def test_the_core_needs_jax_alone():
    assert [re.match(r"[\w-]+", need).group() for need in PROJECT["dependencies"]] == ["jax"]
    code = "import sys, normjax; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"jax", "normjax"} <= set(loaded.split())
    assert not {"flax", "optax", "rich", "matplotlib", "sklearn", "orbax"} & set(loaded.split())


def test_a_missing_extra_says_which_pip_install_brings_it():
    message = 'normjax.lab needs no_such_module: pip install "normjax[lab]"'
    with pytest.raises(ModuleNotFoundError, match=re.escape(message)):
        require("normjax.lab", "lab", "json", "no_such_module")


def test_the_changelog_has_this_version_and_the_licence_is_apache():
    assert f"## [{nj.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "LICENSE").read_text().split("\n")[0].strip() == "Apache License"
    assert PROJECT["license"] == "Apache-2.0"
