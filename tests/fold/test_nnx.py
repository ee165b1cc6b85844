"""`normjax.nnx.fold`: pairs are found in what a model does, and what does not fold says why."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

from normjax import nnx
from tests.closeness import close
from tests.quick import quick_jit

X, ROWS = (2, 6, 5, 3), (4, 3)


class Model(flax_nnx.Module):
    """Its parts as attributes, in the order given, and what it does with them."""

    def __init__(self, call, **parts):
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, x):
        return self.call(self, x)


class Mine(flax_nnx.Conv):
    pass


class MyNorm(nnx.BatchNorm):
    pass


def norm(features=4, kind=nnx.BatchNorm, **settings):
    """In evaluation, with parameters and statistics that are not what they start as."""
    made = kind(features, **{"use_running_average": True, **settings}, rngs=flax_nnx.Rngs(0))
    rng = np.random.default_rng(features)
    for name in ("scale", "bias", "mean", "var"):
        variable = getattr(made, name)
        if variable is not None:
            value = rng.normal(size=features)
            variable.set_value(jnp.asarray(value**2 + 0.1 if name == "var" else value, variable.get_value().dtype))
    return made


def loud():
    """A norm of large scales."""
    made = norm()
    made.scale.set_value(jnp.full(4, 1e6))
    return made


def conv(inputs=3, features=4, kind=flax_nnx.Conv, window=(3, 3), **settings):
    return kind(inputs, features, window, **settings, rngs=flax_nnx.Rngs(1))


def dense(inputs=3, features=4, kind=flax_nnx.Linear, **settings):
    return kind(inputs, features, **settings, rngs=flax_nnx.Rngs(2))


def chain(model, x):
    return model.norm(model.layer(x))


def sequence(model, x):
    x = nnx_relu(model.first_norm(model.first(x)))
    return model.second_norm(model.second(x))


nnx_relu = flax_nnx.relu
frozen = flax_nnx.Sequential(norm())
nnx.replace(frozen, "frozen")


def through_jit(model, x):
    return flax_nnx.jit(lambda model, x: chain(model, x))(model, x)


def through_remat(model, x):
    return flax_nnx.remat(chain)(model, x)


def reading_in_vain(model, x):
    z = model.layer(x)
    jnp.mean(z)
    return model.norm(z)


# what it is: model, x, [(norm, layer)]
FOLDED = {
    "attributes in reverse order": (
        lambda: Model(
            sequence, second_norm=norm(5), first_norm=norm(4), second=conv(4, 5, use_bias=False), first=conv()
        ),
        X,
        [("first_norm", "first"), ("second_norm", "second")],
    ),
    "norms of flax": (lambda: Model(chain, norm=norm(kind=flax_nnx.BatchNorm), layer=conv()), X, "layer"),
    "a frozen norm": (lambda: Model(chain, norm=frozen.layers[0], layer=conv()), X, "layer"),
    "dense": (lambda: Model(chain, layer=dense(), norm=norm()), ROWS, "layer"),
    "dense, no bias": (lambda: Model(chain, layer=dense(use_bias=False), norm=norm()), ROWS, "layer"),
    "dense into two axes": (
        lambda: Model(
            chain, layer=dense((5, 3), (2, 2), flax_nnx.LinearGeneral, axis=(1, 3)), norm=norm(axis=(-2, -1))
        ),
        (2, 5, 6, 3),
        "layer",
    ),
    "1-D": (lambda: Model(chain, layer=conv(window=(3,)), norm=norm()), (2, 6, 3), "layer"),
    "3-D, strided": (
        lambda: Model(chain, layer=conv(window=(2, 2, 2), strides=2), norm=norm()), (1, 3, 4, 5, 3), "layer"
    ),
    "depthwise with a multiplier": (
        lambda: Model(chain, layer=conv(3, 6, feature_group_count=3), norm=norm(6)), X, "layer"
    ),
    "masked": (
        lambda: Model(chain, layer=conv(mask=jnp.arange(108).reshape(3, 3, 3, 4) % 2), norm=norm()), X, "layer"
    ),
    "transposed": (
        lambda: Model(chain, layer=conv(kind=flax_nnx.ConvTranspose, strides=2), norm=norm()), X, "layer"
    ),
    "transposed, the kernel too": (
        lambda: Model(chain, layer=conv(kind=flax_nnx.ConvTranspose, transpose_kernel=True), norm=norm()), X, "layer"
    ),
    "no parameters": (lambda: Model(chain, layer=conv(), norm=norm(use_scale=False, use_bias=False)), X, "layer"),
    "zero-centred": (lambda: Model(chain, layer=conv(), norm=norm(zero_centered=True)), X, "layer"),
    "in words": (
        lambda: Model(chain, layer=conv(), norm=norm(layout="N H W C", axis_names="N H W", axis="C")), X, "layer"
    ),
    "synchronised": (lambda: Model(chain, layer=conv(), norm=norm(axis_name="data")), X, "layer"),
    "inside nnx.jit": (lambda: Model(through_jit, layer=conv(), norm=norm()), X, "layer"),
    "inside nnx.remat": (lambda: Model(through_remat, layer=conv(), norm=norm()), X, "layer"),
    "dropout between": (
        lambda: Model(
            lambda m, x: m.norm(m.drop(m.layer(x))),
            drop=flax_nnx.Dropout(0.5, deterministic=True, rngs=flax_nnx.Rngs(0)),
            layer=conv(), norm=norm(),
        ),
        X,
        "layer",
    ),
    "reading of which nothing comes": (lambda: Model(reading_in_vain, layer=conv(), norm=norm()), X, "layer"),
    "x by name": (lambda: Model(lambda m, x: m.norm(x=m.layer(inputs=x)), layer=conv(), norm=norm()), X, "layer"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "pairs"), FOLDED.values(), ids=FOLDED)
def test_a_pair_folds_wherever_its_modules_stand(make, shape, pairs, rng):
    model, x = make(), jnp.asarray(rng.normal(size=shape), jnp.float32)
    own = (flax_nnx.Param, flax_nnx.BatchStat)
    before = jax.tree.map(np.array, flax_nnx.to_pure_dict(flax_nnx.state(model, own)))
    folded, report = nnx.fold(model, x)
    pairs = [("norm", pairs)] if isinstance(pairs, str) else pairs
    assert [(row.norm, row.layer) for row in report] == pairs
    run = quick_jit(lambda model, x: model(x))
    wanted = run(model, x)
    # As many products as a kernel has entries, at most, each of them rounded.
    close(run(folded, x), wanted, m=108)
    assert np.abs(wanted).max() > 0.1
    after = flax_nnx.to_pure_dict(flax_nnx.state(model, own))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    kinds = {type(node) for _, node in flax_nnx.iter_modules(folded)}
    assert not any(issubclass(kind, (flax_nnx.BatchNorm, nnx.BatchNorm)) for kind in kinds)
    assert not jax.tree.leaves(flax_nnx.state(folded, flax_nnx.BatchStat))


def twice(model, x):
    return model.norm(model.layer(x)) + model.norm(model.other(x))


def shared_layer(model, x):
    return model.norm(model.layer(x)) + model.layer(2 * x)


def residual(model, x):
    z = model.layer(x)
    return z + model.norm(z)


def to_the_head(model, x):
    z = model.layer(x)
    return model.norm(z), model.head(z)


def tied(model, x):
    return model.norm(model.layer(x)) @ model.layer.kernel.get_value().T


def penalised(model, x):
    return model.norm(model.layer(x)), model.layer.kernel.get_value()


def one_kernel():
    model = Model(lambda m, x: m.norm(m.layer(x)) + m.other(x), layer=dense(), other=dense(), norm=norm())
    model.other.kernel = model.layer.kernel
    return model


def kept(model, x):
    model.seen = flax_nnx.Variable(model.layer(x))
    return model.norm(model.seen.get_value())


def looped(model, x):
    return lax.scan(lambda carry, _: (model.norm(model.layer(carry)), None), x, None, 2)[0]


def printed(model, x):
    z = model.layer(x)
    jax.debug.callback(lambda z: None, z)
    return model.norm(z)


def own_dot(*args, **kwargs):
    return jnp.round(lax.dot_general(*args, **kwargs))


def by_examples(kind):
    def call(model, x):
        if kind == "layer":
            return model.norm(jax.vmap(model.layer)(x))
        return jax.vmap(chain, (None, 0))(model, x)

    return call


# what it is: model, x, reason
REFUSED = {
    "an activation between": (
        lambda: Model(lambda m, x: m.norm(nnx_relu(m.layer(x))), layer=conv(), norm=norm()),
        X,
        "its x comes from `max` in `relu`, not straight from a dense layer or a convolution",
    ),
    "a norm used twice": (lambda: Model(twice, layer=conv(), other=conv(), norm=norm()), X, "it is called 2 times"),
    "a layer used twice": (lambda: Model(shared_layer, layer=conv(), norm=norm()), X, "layer is called 2 times"),
    "a residual branch": (
        lambda: Model(residual, layer=conv(), norm=norm()), X, "what layer gives is read by `add` too"
    ),
    "another layer": (
        lambda: Model(to_the_head, layer=conv(), norm=norm(), head=dense(4, 2)), X, "what layer gives is read by head"
    ),
    "the caller": (
        lambda: Model(lambda m, x: (z := m.layer(x), m.norm(z)), layer=conv(), norm=norm()),
        X,
        "what layer gives is read by whoever calls the model too",
    ),
    "a variable": (
        lambda: Model(kept, layer=conv(), norm=norm(), seen=flax_nnx.Variable(jnp.zeros(()))),
        X,
        "what layer gives is read by whoever calls the model too",
    ),
    "a mean that the model reads": (
        lambda: Model(lambda m, x: chain(m, x) + m.norm.mean[...], layer=conv(), norm=norm()),
        X,
        "its parameters or statistics are read outside its call too",
    ),
    "a callback": (lambda: Model(printed, layer=conv(), norm=norm()), X, "what layer gives is read by `debug_"),
    "a norm before a padded convolution": (
        lambda: Model(lambda m, x: m.layer(m.norm(x)), layer=conv(), norm=norm(3)),
        X,
        "its x is an input of the model, with no layer before it",
    ),
    "a pooled convolution": (
        lambda: Model(lambda m, x: m.norm(flax_nnx.avg_pool(m.layer(x), (2, 2))), layer=conv(), norm=norm()),
        X,
        "its x comes from `div`",
    ),
    "another norm before": (
        lambda: Model(lambda m, x: m.norm(m.prev(x)), prev=norm(3, flax_nnx.BatchNorm), norm=norm(3)),
        X,
        "its x comes from prev, not straight",
    ),
    "training": (
        lambda: Model(chain, layer=conv(), norm=norm(use_running_average=False)),
        X,
        "it is in training mode, and normalises by the batch",
    ),
    "training in the call": (
        lambda: Model(lambda m, x: m.norm(m.layer(x), use_running_average=False), layer=conv(), norm=norm()),
        X,
        "it is in training mode",
    ),
    "other axes": (
        lambda: Model(chain, layer=conv(), norm=norm(6, axis=1)),
        X,
        "it normalises along axis 1, but layer has its channels along axis 3",
    ),
    "one of two axes": (
        lambda: Model(chain, layer=dense(3, (2, 4), flax_nnx.LinearGeneral), norm=norm()),
        ROWS,
        "it normalises along axis 2, but layer has its channels along axes 1, 2",
    ),
    "a kernel that is read elsewhere": (
        lambda: Model(tied, layer=dense(), norm=norm()), ROWS, "the kernel or bias of layer is read outside"
    ),
    "a kernel that is returned": (
        lambda: Model(penalised, layer=dense(), norm=norm()), ROWS, "the kernel or bias of layer is read outside"
    ),
    "a kernel of two layers": (one_kernel, ROWS, "the kernel or bias of layer is read outside its call too"),
    "a scale beyond float16": (
        lambda: Model(chain, layer=dense(param_dtype=jnp.float16), norm=loud()),
        ROWS,
        "layer with it would not be finite in float16",
    ),
    "a subclass of a layer": (
        lambda: Model(chain, layer=conv(kind=Mine), norm=norm()), X, "layer is a Mine, which is no layer that fold"
    ),
    "a subclass of a norm": (
        lambda: Model(chain, layer=conv(), norm=norm(kind=MyNorm)),
        X,
        "MyNorm is a subclass of BatchNorm, and what it adds would be lost",
    ),
    "a product of its own": (
        lambda: Model(chain, layer=dense(dot_general=own_dot), norm=norm()), ROWS, "layer has a dot_general of its own"
    ),
    "a kernel for each entry": (
        lambda: Model(chain, layer=dense(3, 4, flax_nnx.LinearGeneral, batch_axis={0: 2}), norm=norm()),
        (2, 5, 3),
        "layer has a kernel for each entry of a batch axis",
    ),
    "never called": (
        lambda: Model(lambda m, x: m.layer(x), layer=conv(), norm=norm()), X, "it is not called, or nothing comes of it"
    ),
    "called in vain": (
        lambda: Model(lambda m, x: (chain(m, x), m.layer(x))[1], layer=conv(), norm=norm()),
        X,
        "it is not called, or nothing comes of it",
    ),
    "a loop": (lambda: Model(looped, layer=conv(3, 3), norm=norm(3)), X, "it is called inside `scan`"),
    "vmap of the layer": (
        lambda: Model(by_examples("layer"), layer=conv(), norm=norm()), X, "it or layer is called under vmap"
    ),
    "vmap of both": (
        lambda: Model(by_examples("both"), layer=conv(), norm=norm()), X, "it or layer is called under vmap"
    ),
    "a negative eps": (
        lambda: Model(chain, layer=conv(), norm=norm(kind=flax_nnx.BatchNorm, epsilon=-1e-5)), X, "fold: eps=-1e-05"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_must_not_fold_stays_with_a_reason(make, shape, reason, rng):
    model, x = make(), jnp.asarray(rng.normal(size=shape), jnp.float32)
    folded, report = nnx.fold(model, x)
    assert report.refused == report
    (row,) = (row for row in report if row.norm == "norm")
    assert row.reason.startswith(reason)
    assert f"norm  not folded: {reason}" in str(report)
    assert flax_nnx.graphdef(folded) == flax_nnx.graphdef(model)
    for one, other in zip(jax.tree.leaves(flax_nnx.state(folded)), jax.tree.leaves(flax_nnx.state(model)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_norm_may_fold_where_another_does_not(rng):
    def call(model, x):
        x = nnx_relu(model.a(model.first(x)))
        return residual(model, x)

    model = Model(call, a=norm(), first=conv(), norm=norm(), layer=conv(4, 4))
    x = jnp.asarray(rng.normal(size=X), jnp.float32)
    folded, report = nnx.fold(model, x)
    assert str(report) == "a     folded into first\nnorm  not folded: what layer gives is read by `add` too"
    assert [row.norm for row in report.folded] == ["a"]
    close(folded(x), model(x), m=72)
    assert isinstance(folded.a, nnx.FoldedBatchNorm)
    assert isinstance(folded.norm, nnx.BatchNorm)


def test_a_shared_block_that_is_called_once_keeps_its_references(rng):
    pair = flax_nnx.List([conv(), norm()])
    model = Model(lambda m, x: m.alias(m.pair[0](x)), pair=pair, alias=pair[1])
    x = jnp.asarray(rng.normal(size=X), jnp.float32)
    folded, report = nnx.fold(model, x)
    assert [(row.norm, row.layer) for row in report] == [("alias", "pair.0")]
    assert folded.alias is folded.pair[1]
    close(folded(x), model(x), m=27)


@pytest.mark.parametrize(
    ("of_layer", "of_norm"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", None)]
)
def test_a_folded_model_answers_in_the_dtype_of_the_norm(of_layer, of_norm, rng):
    layer = conv(dtype=of_layer, param_dtype=of_layer)
    model = Model(chain, layer=layer, norm=norm(dtype=of_norm))
    x = jnp.asarray(rng.normal(size=X), jnp.float32)
    folded, _ = nnx.fold(model, x)
    wanted = model(x)
    assert folded(x).dtype == wanted.dtype
    assert folded.layer.kernel.get_value().dtype == of_layer
    # Of half precision: kernel, bias, what the layer gives and its 27 products.
    bound = 4 * float(jnp.finfo(of_layer).eps) * np.sqrt(27) * np.abs(np.float32(wanted)).max()
    np.testing.assert_allclose(np.float32(folded(x)), np.float32(wanted), rtol=0, atol=bound)


def test_a_folded_norm_takes_every_mode_and_mask(rng):
    model = Model(lambda m, x: m.norm(m.layer(x), mask=x[..., :1] > 0), layer=conv(), norm=norm())
    x = jnp.asarray(rng.normal(size=X), jnp.float32)
    folded, _ = nnx.fold(model, x)
    wanted = model(x)
    folded.train()
    close(folded(x), wanted, m=27)
    np.testing.assert_array_equal(folded.norm(x, use_running_average=False), x)


def test_an_abstract_example_and_other_arguments_will_do(rng):
    class Two(flax_nnx.Module):
        def __init__(self):
            self.layer, self.norm = conv(), norm()

        def __call__(self, x, name, *, double):
            return {name: 2 * chain(self, x) if double else chain(self, x)}

    model, x = Two(), jnp.asarray(rng.normal(size=X), jnp.float32)
    folded, report = nnx.fold(model, jax.ShapeDtypeStruct(X, jnp.float32), "y", double=True)
    assert len(report.folded) == 1
    close(folded(x, "y", double=True)["y"], model(x, "y", double=True)["y"], m=27)


def test_a_model_without_batch_norm_and_one_that_fails_say_so():
    with pytest.raises(ValueError, match=r"^fold: there is no batch norm of flax.nnx or normjax.nnx in the model\.$"):
        nnx.fold(conv(), jnp.ones(X))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        nnx.fold(Model(chain, layer=conv(), norm=norm(7)), jnp.ones(X))
    assert "fold: raised while the model was traced on the example." in raised.value.__notes__


def test_folding_again_finds_nothing_left():
    folded, _ = nnx.fold(Model(chain, layer=conv(), norm=norm()), jnp.ones(X))
    with pytest.raises(ValueError, match="there is no batch norm"):
        nnx.fold(folded, jnp.ones(X))
