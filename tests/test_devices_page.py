"""The page on many devices: its programs run as written and train as one device does, and its table is measured."""

import re
import sys
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import normjax as nj
from normjax import reference
from tests.quick import quick_jit
from tests.sync.mappings import DATA, GRADIENT, PARAMETER, Jit, Pmap, ShardMap
from tests.sync.test_processes import on_a_port

PAGE = (Path(__file__).parents[1] / "docs" / "devices.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LOOPS = {
    "pmap": "jax.pmap(",
    "shard_map": "jax.device_put((x, target)",
    "jit": 'layout="N C", axis_names="N", train=True)\n    return jnp.mean',
}
DEVICES = 8
OVER = ("data",), (DEVICES,)


@pytest.fixture(scope="module")
def page():
    """``page(text)``: the names defined once the block with this text has run, each after those it goes on from."""
    names, snapshots = {}, []
    for block in BLOCKS:
        if "jax.distributed" in block:
            continue  # needs processes of its own
        # A copy: what a block defines goes on seeing its own names when a later one takes them anew.
        names = {} if re.match(r"(import|from) ", block) else dict(names)
        exec(block, names)
        snapshots.append((block, names))

    def after(text: str) -> dict:
        (found,) = (defined for block, defined in snapshots if text in block)
        return found

    return after


def norm(h, scale, bias, where):
    """The textbook on one device: y, and the mean and variance of the rows that count."""
    count = jnp.sum(where)
    mean = jnp.sum(jnp.where(where, h, 0), 0) / count
    var = jnp.sum(jnp.where(where, (h - mean) ** 2, 0), 0) / count
    return (h - mean) / jnp.sqrt(var + 1e-5) * scale + bias, (mean, var)


def loss_of_one(weights, x, target, where=True):
    """The loss of the page's model on one device, and the mean and variance of the batch."""
    where = jnp.broadcast_to(where, (len(x), 1))
    y, moments = norm(x @ weights["in"], weights["scale"], weights["bias"], where)
    terms = jnp.mean((jnp.tanh(y) @ weights["out"] - target) ** 2, 1, keepdims=True)
    return jnp.sum(jnp.where(where, terms, 0)) / jnp.sum(where), moments


def plain(weights):
    """The page's weights, or their gradients, as a dict of arrays."""
    affine = weights["norm"]
    return {"in": weights["in"], "out": weights["out"], "scale": affine.scale, "bias": affine.bias}


def train_one(weights, x, target, steps):
    """Weights, running mean and variance, and the losses of training in float64 on one device."""
    optimiser = optax.adam(1e-2)
    state = jnp.zeros(32), jnp.ones(32)

    @quick_jit
    def step(weights, state, opt):
        (loss, batch), grads = jax.value_and_grad(loss_of_one, has_aux=True)(weights, x, target)
        updates, opt = optimiser.update(grads, opt, weights)
        state = tuple(0.9 * old + 0.1 * new for old, new in zip(state, batch, strict=True))
        return optax.apply_updates(weights, updates), state, opt, loss

    carry, losses = (weights, state, optimiser.init(weights)), []
    for _ in range(steps):
        *carry, loss = step(*carry)
        losses.append(float(loss))
    return *carry[:2], losses


def double(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.fixture(scope="module")
def one_device(page):
    """Five steps of training on the data that all loops have."""
    names = page(LOOPS["shard_map"])
    with jax.enable_x64(True):
        return train_one(*double((plain(names["weights"]), names["x"], names["target"])), steps=5)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_the_page_trains_as_one_device_does(loop, page, one_device, x64):
    names = page(LOOPS[loop])
    assert names["losses"][-1] < names["losses"][0] * 2 / 3
    x, target = double((names["x"], names["target"]))
    weights = double(names["weights"])
    state = nj.BatchStats(np.zeros(32), np.ones(32), np.int32(0), np.zeros(32, np.float32), "C")
    carry, losses = (weights, state, names["optimiser"].init(weights)), []
    for _ in range(5):
        *carry, loss = names["step"](*carry, x, target)
        losses.append(float(loss))
    wanted, (mean, var), wanted_losses = one_device
    for name, value in plain(carry[0]).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-9, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(carry[1].mean, mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(carry[1].var, var, rtol=1e-9)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-9)
    # The page's own run is in float32, whose roundings training makes larger: only its start is compared.
    np.testing.assert_allclose(names["losses"][:3], wanted_losses[:3], rtol=1e-4)


def test_the_loops_are_short():
    for text in LOOPS.values():
        (block,) = (block for block in BLOCKS if text in block)
        assert len([line for line in block.splitlines() if line.strip()]) <= 32


def test_the_masked_example_is_one_device_on_the_rows_that_count(page):
    names = page("masked_state")
    valid = np.asarray(names["valid"])
    assert valid.sum() == names["counts"].sum() == 199
    with jax.enable_x64(True):
        weights, rows = double(plain(names["weights"])), double((names["x"][valid], names["target"][valid]))
        found = quick_jit(jax.value_and_grad(loss_of_one, has_aux=True))(weights, *rows)
    (loss, (mean, var)), grads = double(found)
    # float32: sums of 199 terms of order one.
    np.testing.assert_allclose(names["loss"], loss, rtol=1e-5)
    for name, value in plain(names["grads"]).items():
        np.testing.assert_allclose(value, grads[name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(names["masked_state"].mean, 0.1 * mean, atol=1e-6)
    np.testing.assert_allclose(names["masked_state"].var, 0.9 + 0.1 * var, rtol=1e-5)


def test_groups_and_a_mesh_of_two_axes_are_each_half_by_itself(page):
    names = page("y_meshed")
    halves = np.asarray(names["x"]).reshape(2, -1, 16)
    wanted = reference.normalize(halves, layout="G N C", axis_names="N").reshape(-1, 16)
    np.testing.assert_allclose(names["y_grouped"], wanted, atol=1e-5)
    np.testing.assert_allclose(names["y_meshed"], wanted, atol=1e-5)


def test_the_pooled_replicas_are_the_mixture_of_their_statistics(page):
    names = page("pooled =")
    shards = np.asarray(names["x"], np.float64).reshape(DEVICES, -1, 16)
    means, variances = 0.1 * shards.mean(1), 0.9 + 0.1 * shards.var(1)
    np.testing.assert_allclose(names["pooled"].mean, means.mean(0), atol=1e-6)
    np.testing.assert_allclose(names["pooled"].var, variances.mean(0) + means.var(0), rtol=1e-6)


def table() -> dict[str, list[list[str]]]:
    """The rows of the page's table by mapping: loss, what `g` is, three ratios, and what is right."""
    rows: dict = {}
    lines = PAGE.split("## Who sums the gradients", 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0].split("\n")
    for line in lines[2:]:
        mapping, loss, *others = (cell.strip().strip("`") for cell in line.split("|")[1:-1])
        rows.setdefault(mapping, []).append([loss, *others])
    return rows


MAPPED = {
    "pmap": Pmap(*OVER),
    "shard_map, `check_vma=False": ShardMap(*OVER, check=False),
    "shard_map": ShardMap(*OVER),
    "jit": Jit(*OVER),
}


def test_states_of_the_devices_own_train_on_as_each_would_alone(page):
    names = page("def step_apart")
    for device, rows in enumerate(names["x"].reshape(DEVICES, -1, 16)):
        state = nj.BatchStats.init(C=16)
        for _ in range(3):
            _, state = nj.batch_norm(rows, None, state, layout="N C", axis_names="N", train=True)
        own = jax.tree.map(lambda leaf, device=device: leaf[device], names["states"])
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6), own, state)


@pytest.mark.parametrize(("size", "works"), [(32, True), (64, False)])
def test_an_explicit_mesh_splits_a_sharded_axis_where_the_page_says_so(page, size, works):
    assert f"`N=(B n={size})`" in PAGE
    x = np.asarray(page("def step_apart")["x"])
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        norm = jax.jit(lambda x: nj.batch_norm(x, layout=f"N=(B n={size}) C", axis_names="n", train=True)[0])
        if not works:
            with pytest.raises(ValueError, match=r"^batch_norm: .*multiple of 8"):
                norm(sharded)
            return
        want = reference.normalize(x, layout=f"N=(B n={size}) C", axis_names="n")
        np.testing.assert_allclose(norm(sharded), want, atol=1e-5)


def test_the_table_has_every_loss_under_every_mapping():
    assert list(table()) == list(MAPPED)
    losses = {mapping: [row[0] for row in rows] for mapping, rows in table().items()}
    assert losses["pmap"] == losses["shard_map, `check_vma=False"] == losses["shard_map"]
    assert losses["jit"] == [loss for loss in losses["pmap"] if "data" not in loss]


@pytest.mark.parametrize("mapping", MAPPED)
def test_a_ratio_of_the_table_is_what_is_measured(mapping, rng, x64):
    x, g = rng.normal(1.0, 2.0, (2, DEVICES, 4, 3))
    scale, bias = rng.normal(size=(2, 3))
    rows, layer, names = table()[mapping], MAPPED[mapping], {"jnp": jnp, "lax": lax}
    by_hand = mapping != "jit"
    options = {"layout": "N C" if by_hand else "data N C", "axis_names": "N data", "train": True}

    def step(x, g, scale, bias):
        results = []
        for loss, *_, right in rows:

            def of_one(scale, x, loss=loss):
                y, _ = nj.batch_norm(x, nj.Affine(scale, bias, "C"), **options)
                return eval(loss, {**names, "terms": g * y})

            slope, of_x = jax.grad(of_one, (0, 1))(scale, x)
            both = (lax.pmean(slope, "data"), lax.psum(slope, "data")) if by_hand else (slope, slope)
            results += slope, *both, eval(right, {**names, "g": slope}), of_x
        return tuple(results)

    roles = (*(GRADIENT,) * 4, DATA) * len(rows)
    program = quick_jit(layer.wrap(step, (DATA, DATA, PARAMETER, PARAMETER), roles))
    found = [np.asarray(a) for a in program(layer.place(DATA, x), layer.place(DATA, g), scale, bias)]
    of_x, total, _ = reference.backward(x, g, scale, bias, layout="S N C", axis_names="S N", names="C")
    for i, (loss, held, mean, sum_, of_rows, _) in enumerate(rows):
        own, averaged, summed, mended, rows_held = found[5 * i : 5 * i + 5]
        terms = x.size if "mean" in loss else 1
        true = total / terms
        assert (own.shape == (DEVICES, 3)) == (held == "own shares")
        assert held != "own shares" or np.ptp(own, 0).min() > 1e-6
        close(averaged, float(Fraction(mean)) * true)
        if by_hand:
            close(summed, float(Fraction(sum_)) * true)
        close(rows_held, float(Fraction(of_rows)) * of_x / terms)
        close(mended, true)
        if "pmean" in loss:
            close(averaged, true)  # the way that is right under every mapping


def close(actual, wanted):
    np.testing.assert_allclose(actual, np.broadcast_to(wanted, actual.shape), rtol=1e-10, atol=1e-12)


def losses_of_hosts(script: Path, hosts: int) -> list[list[float]]:
    """What the program for several hosts prints on each of them, each with two CPU devices."""
    commands = lambda port: [  # noqa: E731
        [sys.executable, str(script), f"127.0.0.1:{port}", str(hosts), str(host)] for host in range(hosts)
    ]
    said = on_a_port(commands, [script.with_suffix(f".{host}.log") for host in range(hosts)])
    return [
        [float(loss) for loss in re.findall(rf"^host {host} step \d+ loss (\S+)$", text, re.MULTILINE)]
        for host, text in enumerate(said)
    ]


def test_the_program_for_several_hosts_trains_as_one_device_does(tmp_path, monkeypatch, x64):
    (block,) = (block for block in BLOCKS if "jax.distributed" in block)
    script = tmp_path / "train.py"
    script.write_text(block)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    first, second = losses_of_hosts(script, 2)
    assert first == second
    assert len(first) == 20
    x = np.concatenate([np.random.default_rng(host).normal(size=(64, 16)) for host in range(2)])
    kernel = np.random.default_rng(0).normal(size=(16, 32)) / 4
    weights = {"in": kernel, "out": np.zeros((32, 4)), "scale": np.ones(32), "bias": np.zeros(32)}
    _, _, losses = train_one(weights, x, np.sin(2 * x[:, :4]), steps=20)
    # float32 on the hosts, float64 here, and six decimals: a batch of one host alone would be off by a tenth.
    np.testing.assert_allclose(first, losses, rtol=1e-3)
