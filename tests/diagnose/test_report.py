"""The report of `diagnose`: table, picture, error for CI, what was not checked; and the arguments that it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.diagnose import diagnose
from normjax.linen import BatchNorm

AXES = {"layout": "N C", "axis_names": "N"}
FRESH = nj.BatchStats.init(C=2)
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 2)), jnp.float32)


def forward(stats, x, train):
    return nj.batch_norm(x, None, stats, **AXES, train=train)


@pytest.fixture(scope="module")
def untrained():
    return diagnose(forward, FRESH, X)


def test_the_report_prints_a_table_then_causes_and_what_was_not_checked(untrained):
    lines = str(untrained).splitlines()
    assert re.fullmatch(r"severity  fault          layer  evidence", lines[0])
    assert set(lines[1]) == {"-", " "}
    assert re.fullmatch(r"error     never updated  stats  count 0", lines[2])
    assert lines[4] == "never updated"
    assert lines[5].startswith("  cause: ")
    assert any(line.startswith("not checked: redundant bias, scale near 0: pass params=") for line in lines)
    assert max(map(len, lines)) <= 100


def test_raise_if_raises_with_the_findings_for_what_is_so_severe_or_more(untrained):
    for severity in ("error", "warning"):
        with pytest.raises(AssertionError, match=r"diagnose found 1 fault:(?s:.)*never updated  stats"):
            untrained.raise_if(severity)
    with pytest.raises(ValueError, match=r'Report.raise_if: severity=\'fatal\' must be "error" or "warning"'):
        untrained.raise_if("fatal")


def test_raise_if_error_lets_warnings_pass():
    stats = FRESH
    for _ in range(24):  # 0.9²⁴ = 8 % of the start values
        _, stats = forward(stats, X + 6, True)
    report = diagnose(forward, stats, X + 6)
    assert [(one.fault, one.severity) for one in report.findings] == [("warm-up too short", "warning")]
    report.raise_if("error")
    with pytest.raises(AssertionError):
        report.raise_if("warning")


def test_the_picture_has_a_dot_for_every_channel_and_marks_faulty_layers(untrained):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = untrained.plot()
    far, noisy = figure.axes
    assert sum(len(line.get_xdata()) for line in far.lines if line.get_marker() == "o") == 2
    assert [label.get_text() for label in far.get_yticklabels()] == ["stats *"]
    # 16 entries, whose mean errs by a quarter of a standard deviation.
    assert 0.15 < noisy.patches[0].get_width() < 0.35
    pyplot.close(figure)


def test_distances_are_in_standard_errors_of_the_batch():
    stats = nj.BatchStats(jnp.array([0.0, 3.0]), jnp.ones(2), jnp.int32(100), jnp.ones(2), "C")
    report = diagnose(forward, stats, X)
    distance = abs(float(X[:, 1].mean()) - 3) / (float(X[:, 1].std()) / np.sqrt(16)) / np.sqrt(1.1)
    # 32 resamples know a standard error to 13 %.
    np.testing.assert_allclose(report.distances[0][1], distance, rtol=0.4)


def test_the_weight_of_a_batch_is_measured_and_a_given_one_is_believed():
    x = X + 30
    stats = nj.BatchStats(jnp.full(2, 4.0), jnp.full(2, 1.0), jnp.int32(10), jnp.ones(2), "C")
    slow = lambda stats, x, train: nj.batch_norm(x, None, stats, **AXES, train=train, running=nj.Ema(0.01))  # noqa: E731
    (measured,) = diagnose(slow, stats, x).findings
    assert measured.evidence == "90% of the start values left after 10 updates of weight 0.01"
    (told,) = diagnose(slow, stats, x, running=nj.Ema(0.02)).findings
    assert told.evidence == "82% of the start values left after 10 updates of weight 0.02"
    (counted,) = diagnose(slow, stats, x, running=nj.Cumulative()).findings
    assert counted.fault == "drift"


def test_a_mean_of_a_thousand_deviations_is_no_constant_channel():
    slow = lambda stats, x, train: nj.batch_norm(x, None, stats, **AXES, train=train, running=nj.Ema(0.001))  # noqa: E731
    stats = nj.BatchStats(X.mean(0) + 1000, X.var(0), jnp.int32(9000), jnp.ones(2), "C")
    assert diagnose(slow, stats, X + 1000).findings == ()


def test_statistics_averaged_by_other_counts_are_not_taken_for_a_short_warm_up():
    stats = nj.update(
        FRESH, nj.moments(X + 5, **AXES), running=nj.Cumulative()
    )  # count 1: 90 % of the start by Ema(0.1)
    assert diagnose(forward, stats, X + 5).findings == ()


def test_counts_of_linen_are_found_beside_its_statistics():
    norm = BatchNorm(running=nj.Cumulative())
    variables = dict(norm.init(jax.random.key(0), X, use_running_average=False))
    params = variables.pop("params")

    def forward(stats, x, train):
        options = {"use_running_average": not train, "mutable": list(stats)}
        return norm.apply({"params": params, **stats}, x, **options)

    (found,) = diagnose(forward, variables, X).findings
    assert (found.fault, found.evidence) == ("never updated", "count 0")


def test_layers_trained_frozen_are_no_fault_but_their_drift_is_not_checked():
    stats = nj.BatchStats(jnp.full(2, 4.0), jnp.full(2, 2.0), jnp.int32(100), jnp.ones(2), "C")
    report = diagnose(lambda stats, x, train: forward(stats, x, False), stats, X)
    assert report.findings == ()
    assert any(text.startswith("drift of stats: trained frozen") for text in report.not_checked)


def test_parameters_hidden_in_a_jitted_forward_are_found():
    params = {"kernel": jnp.eye(2), "bias": jnp.ones(2)}
    hidden = jax.jit(
        lambda stats, x, train: forward(stats, x @ params["kernel"] + params["bias"], train), static_argnums=2
    )
    report = diagnose(hidden, FRESH, X, params=params)
    assert [one.layer for one in report.findings if one.fault == "redundant bias"] == ["bias"]


def test_parameters_that_forward_does_not_close_over_are_not_checked():
    report = diagnose(forward, FRESH, X, params={"bias": jnp.ones(2)})
    assert any(text.startswith("redundant bias: let forward close over") for text in report.not_checked)


def test_nothing_given_is_changed():
    stats = jax.tree.map(np.array, FRESH)
    diagnose(forward, stats, X)
    for name in ("mean", "var", "count", "weight"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(FRESH, name))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forward": 3}, "diagnose: forward must be a function"),
        ({"running": 0.1}, "diagnose: running must be an Ema, a Cumulative or None; got float"),
        ({"batch": (X, X[:3])}, "diagnose: the arrays of batch need one leading axis of examples"),
        ({"pad_axis": 2}, "diagnose: pad_axis=2 must be an axis of the batch's arrays"),
        (
            {"replica_axis": 1},
            "diagnose: replica_axis=1 must be an axis of the statistics; stats's mean has shape (2,)",
        ),
        ({"forward": lambda stats, x, train: (x, None)}, "diagnose: forward must return (y, stats)"),
    ],
    ids=["forward", "running", "batch", "pad_axis", "replica_axis", "what forward returns"],
)
def test_wrong_arguments_are_refused_in_words(options, words):
    arguments = {"forward": forward, "stats": FRESH, "batch": X, **options}
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        diagnose(arguments.pop("forward"), arguments.pop("stats"), arguments.pop("batch"), **arguments)


def test_other_statistics_than_those_given_are_an_error():
    wrapped = lambda stats, x, train: (x, {"batch_stats": stats})  # noqa: E731
    given = {"norm": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    with pytest.raises(ValueError, match=r"^diagnose: forward must return \(y, stats\) .* nothing at 'norm/mean'"):
        diagnose(wrapped, given, X)
    with pytest.raises(TypeError, match=r"^diagnose: forward must return a pair, \(y, stats\); got"):
        diagnose(lambda stats, x, train: x, given, X)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_bias_before_batch_norm_is_redundant_in_half_precision_too(dtype):
    rng = np.random.default_rng(2)
    params = {"kernel": jnp.asarray(rng.normal(size=(2, 2)), jnp.float32), "bias": jnp.ones(2)}

    def biased(stats, x, train):
        z = x.astype(dtype) @ params["kernel"].astype(dtype) + params["bias"].astype(dtype)
        y, stats = forward(stats, z, train)
        return jnp.tanh(y) * (1 + x), stats

    stats = FRESH
    for _ in range(60):
        _, stats = biased(stats, X, True)
    found = diagnose(biased, stats, X, params=params).findings
    assert [(finding.fault, finding.layer) for finding in found] == [("redundant bias", "bias")]
