"""The timing suite: what it selects, that it fails on a wrong answer, how it pairs times, what it renders."""

import dataclasses
import functools
import itertools
import json
import random
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

import normjax as nj
from benchmarks import compiling, contestants, imports, problems, render, results, timing, worker
from benchmarks.__main__ import chosen, main
from benchmarks.cases import BOTH, CASES, FAMILIES, FORWARD, Case, select
from normjax import _running

ROOT = Path(__file__).parents[2]
SMALLEST = "^layer small batch 64x1024 f32 forward$"

TINY = {
    "layer": Case("layer", "tiny", (4, 8), "N C", "C"),
    "long rows": Case("layer", "tiny", (4, 1024), "N C", "C"),
    "batch": Case("batch", "tiny", (32, 8), "N C", "N", mode=FORWARD),
    "batch, masked": Case("batch", "tiny", (4, 3, 8), "N T C", "N T", masked=True),
    "ghost": Case("batch", "tiny", (32, 8), "N=(B n=16) C", "n", ghost=16),
    "group, bfloat16": Case("group", "tiny", (2, 3, 3, 8), "N H W C=(G=4 K)", "H W K", "bfloat16", groups=4),
}


@pytest.fixture(autouse=True)
def _keep_compiled_programs(monkeypatch):
    """The other tests of this process need theirs."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


def test_every_row_has_a_name_of_its_own():
    keys = [case.key for case in CASES]
    assert len(set(keys)) == len(keys)


def test_every_family_is_timed_forward_and_backward_in_both_dtypes():
    covered = {(case.family, case.mode, case.dtype) for case in CASES}
    assert covered == set(itertools.product(FAMILIES, (FORWARD, BOTH), ("float32", "bfloat16")))


def test_the_size_of_a_group_is_the_number_of_entries_that_the_library_pools():
    for case in {case.problem for case in CASES}:
        x = jax.ShapeDtypeStruct(case.shape, case.dtype)
        pool = functools.partial(nj.moments, layout=case.layout, axis_names=case.axis_names)
        assert case.group_size * jax.eval_shape(pool, x).mean.size == np.prod(case.shape), case.key


def test_filters_narrow_the_rows_together():
    both = select(CASES, only="512x768", families=["rms"])
    assert [case.key for case in both] == [f"rms transformer 512x768 f32 {mode}" for mode in (FORWARD, BOTH)]
    quick = select(CASES, quick=True)
    assert {case.family for case in quick} == set(FAMILIES)
    assert len(quick) < len(select(CASES)) / 4
    assert select(CASES, only="no such row") == []


A_FILE = Path(__file__)
REFUSED = {
    "no row": (["list", "--only", "no such row"], "no row matches"),
    "a broken expression": (["--only", "("], "argument --only: '(' is no regular expression: "),
    "no process": (["--processes", "0"], "argument --processes: '0' is no number from 1"),
    "a process less than none": (["--processes", "-1"], "argument --processes: '-1' is no number from 1"),
    "no round": (["--rounds", "0"], "argument --rounds: '0' is no number from 1"),
    "half a round": (["--rounds", "0.5"], "argument --rounds: '0.5' is no number from 1"),
    "an unknown contestant": (["--against", "flux,linen"], "argument --against: no contestant 'flux'; there are "),
    "an empty contestant": (["--against", "linen,"], "argument --against: no contestant ''; there are "),
    "an unknown family": (["--family", "weight"], "argument --family: invalid choice: 'weight'"),
    "rows to render": (["render", "--only", "layer"], "`render` shows every stored line, and takes no --only"),
    "a family to render": (["render", "--family", "rms"], "`render` shows every stored line, and takes no --family"),
    "rounds to render": (["render", "--rounds", "5"], "`render` shows every stored line, and takes no --rounds"),
    "memory to list": (["list", "--memory", "fresh"], "`list` measures nothing, and takes no --memory"),
    "a folder that is not there": (["render", "--out", "no such folder"], "No such file or directory: 'no such folder"),
    "a file as the folder": (["--against", "copy", "--out", str(A_FILE)], f"File exists: '{A_FILE}'"),
    "a folder under a file": (["--against", "copy", "--out", f"{A_FILE}/in"], f"Not a directory: '{A_FILE}/in'"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused_in_a_line_before_anything_is_measured(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments, launch=lambda settings: pytest.fail("measured"))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("benchmarks: ")
    assert error.count("\n") == 1


def test_a_contestant_that_is_not_installed_is_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setitem(contestants.PEERS, "torch", contestants.Peer("torch:prepare", "no_such_module"))
    assert chosen(["linen", "torch"]) == ["normjax", "linen"]
    assert "left out: torch (pip install -r benchmarks/requirements.txt)" in capsys.readouterr().err
    assert (ROOT / "benchmarks/requirements.txt").is_file()


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("output", problems.OUTPUTS + problems.RUNNING)
def test_an_answer_is_right_only_if_each_output_is(output, contract):
    case = TINY["batch, masked"]
    answer = dict(problems.exact(case))
    assert problems.is_right(case, problems.errors(case, answer), contract=contract)
    size = max(1, np.max(np.abs(answer[output])))
    for fault in (answer[output] + 1e-4 * size, np.where(answer[output] == answer[output].max(), np.nan, 0)):
        assert not problems.is_right(case, problems.errors(case, answer | {output: fault}), contract=contract)


@pytest.mark.parametrize("kind", TINY)
def test_the_contract_is_stricter_than_what_a_peer_is_held_to(kind):
    case = TINY[kind]
    for output in problems.exact(case):
        strict, usual = (problems.bound(case, output, contract=contract) for contract in (True, False))
        assert strict < usual if output in ("y", *problems.RUNNING) else strict == usual


def test_running_statistics_are_compared_for_a_batch_norm_in_training_alone():
    expected = {"batch": {"y", "mean", "var"}, "layer": {"y", "dx", "dscale", "dbias"}}
    for kind, names in expected.items():
        case = TINY[kind]
        ready = contestants.OWN["normjax"](case, problems.problem(case))
        assert set(ready.errors(ready.call())) == names
    evaluation = dataclasses.replace(TINY["batch"], train=False)
    assert set(problems.exact(evaluation)) == {"y"}


INSTALLED = [name for name in contestants.NAMES if name not in contestants.missing()]


@pytest.mark.parametrize("kind", ["batch, masked", "ghost", "group, bfloat16"])
@pytest.mark.parametrize("name", INSTALLED)
def test_a_contestant_answers_right_or_says_that_it_has_no_such_norm(name, kind):
    case = TINY[kind]
    ready = contestants.load([name])[name](case, problems.problem(case))
    if ready is None:
        assert name == "linen two-pass" or case.masked or case.ghost
    else:
        contract = name in contestants.GUARDED
        assert problems.is_right(case, ready.errors(ready.call()), contract=contract)


def _off_by_a_percent(case):
    right = contestants.build_normjax(case)
    return lambda *arrays: (right(*arrays)[0] * 1.01, None)


def _off_by_a_hundred_thousandth(case):
    right = contestants.build_normjax(case)
    return lambda *arrays: (right(*arrays)[0] * (1 + 1e-5), None)


def _without_gradient(case):
    right = contestants.build_normjax(case)
    return lambda *arrays: (jax.lax.stop_gradient(right(*arrays)[0]), None)


def _raises(case):
    raise ValueError("planted")


def _field(**planted):
    field = {name: contestants.in_jax(build) for name, build in planted.items()}
    return contestants.OWN | {"autodiff": contestants.OWN["normjax"]} | field


def _in_this_process(field, case):
    """A launcher that measures one case with other contestants."""

    def launch(settings):
        with open(settings["file"], "a") as file:
            options = {key: settings[key] for key in ("process", "rounds", "memory")}
            worker.run([case], field, lambda record: file.write(json.dumps(record) + "\n"), **options)

    return launch


def _status(tmp_path, field, case=TINY["layer"]):
    arguments = ["--only", SMALLEST, "--processes", "1", "--rounds", "1", "--out", str(tmp_path)]
    return main(arguments, launch=_in_this_process(field, case))


@pytest.mark.parametrize(
    ("build", "verdict"), [(_off_by_a_percent, "wrong"), (_without_gradient, "wrong"), (_raises, "failed")]
)
def test_a_wrong_answer_of_normjax_fails_the_suite_and_is_not_timed(build, verdict, tmp_path, capsys):
    assert _status(tmp_path, _field(normjax=build)) == 1
    printed = capsys.readouterr()
    assert f"WRONG: {TINY['layer'].key}: normjax {verdict} in process 0" in printed.err
    assert "| layer tiny 4x8 f32 | wrong |" in printed.out
    assert not any("times_s" in line for line in results.read(tmp_path / "times.jsonl"))


@pytest.mark.parametrize(("build", "cell"), [(_off_by_a_percent, ", wrong |"), (_raises, "| failed |")])
def test_a_wrong_answer_of_a_peer_is_marked_and_the_suite_passes(build, cell, tmp_path, capsys):
    assert _status(tmp_path, _field(linen=build)) == 0
    assert cell in capsys.readouterr().out


def test_what_is_right_of_a_peer_is_not_close_enough_for_normjax(tmp_path, capsys):
    case = TINY["long rows"]
    assert _status(tmp_path, _field(linen=_off_by_a_hundred_thousandth), case) == 0
    assert "wrong" not in capsys.readouterr().out.partition("###")[2]
    assert _status(tmp_path, _field(normjax=_off_by_a_hundred_thousandth), case) == 1


@pytest.mark.parametrize("statistic", ["mean", "var"])
def test_a_fault_in_the_step_of_the_running_statistics_fails_the_suite(statistic, tmp_path, monkeypatch, capsys):
    step = _running._step

    def faulty(*arguments):
        new = step(*arguments)
        return dataclasses.replace(new, **{statistic: getattr(new, statistic) * 1.00001})

    assert _status(tmp_path, _field(), TINY["batch"]) == 0
    monkeypatch.setattr(_running, "_step", faulty)
    assert _status(tmp_path, _field(), TINY["batch"]) == 1
    assert "normjax wrong in process 0" in capsys.readouterr().err


def test_a_batch_norm_that_returns_no_running_statistics_fails_the_suite(tmp_path, capsys):
    def forgetful(case):
        right = contestants.build_normjax(case)
        return lambda *arrays: (right(*arrays)[0], None)

    assert _status(tmp_path, _field(normjax=forgetful), TINY["batch"]) == 1


def test_every_contestant_has_one_turn_in_a_round_of_as_many_calls():
    log = []
    field = {name: functools.partial(log.append, name) for name in "abc"}
    turns = timing.alternate(field, rounds=6, calls=3, rng=random.Random(0))
    assert {name: len(of) for name, of in turns.items()} == dict.fromkeys("abc", 6)
    rounds = [log[i : i + 12] for i in range(0, len(log), 12)]
    orders = {tuple(dict.fromkeys(of_round)) for of_round in rounds}
    assert all(of_round == [name for name in dict.fromkeys(of_round) for _ in range(4)] for of_round in rounds)
    assert all(sorted(order) == list("abc") for order in orders)
    assert len(orders) > 1


def test_a_result_is_dropped_before_the_next_call():
    class Result:
        pass

    born = []

    def call():
        assert all(result() is None for result in born)
        result = Result()
        born.append(weakref.ref(result))
        return result

    timing.alternate({"a": call, "b": call}, rounds=2, calls=3, rng=random.Random(0))
    assert len(born) == 2 * 2 * 4


@pytest.mark.parametrize(("memory", "least", "most"), [("warm", 0, 100), ("fresh", 2000, 9000)])
def test_large_results_cost_no_page_faults_in_warm_memory_and_all_of_them_in_fresh(memory, least, most):
    code = "from benchmarks.timing import turn; print(turn(lambda: b'x' * 2**24, 5)[1])"
    environment = timing.environment(memory)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert least <= float(ran.stdout) <= most


def _line(contestant, process, times, case=TINY["layer"], **fields):
    timed = {"times_s": times, "compile_s": 0.25, "faults": 0.0} if times else {}
    return {
        "kind": "time",
        "case": case.key,
        "mode": case.mode,
        "contestant": contestant,
        "process": process,
        "verdict": "right",
        "errors": {},
        **timed,
        "device": "cpu",
        "processor": "abacus",
        "cpus": 2,
        "memory": "warm",
        "python": "3.11",
        "versions": {"jax": "0.10"},
    } | fields


LINES = [
    _line("linen", 1, [1.0, 1.0, 1.0]),
    _line("normjax", 0, [1e-3, 10e-3, 6e-3]),
    _line("linen", 0, [2e-3, 5e-3, 1e-3]),
    _line("normjax", 1, [0.5, 0.5, 0.5]),
    _line("linen", 2, [1.0, 1.0, 1.0]),
    _line("normjax", 2, [4.0, 4.0, 4.0]),
    _line("torch", 0, [1e-3, 10e-3, 6e-3], verdict="wrong"),
    _line("keras", 0, [], verdict="failed"),
    {
        "kind": "import",
        "process": 0,
        "jax_s": 0.7,
        "normjax_s": 0.03,
        "device": "cpu",
        "processor": "quill",
        "cpus": 4,
        "python": "3.12",
        "versions": {"jax": "0.12"},
    },
]


def test_ratios_are_formed_within_rounds_then_within_processes():
    (row,) = results.rows(LINES)
    # Process 0: the median of 1/2, 10/5, 6/1 is 2, where the ratio of the medians is 3.
    assert row.ratios["linen"] == results.Ratio(2.0, 0.5, 4.0, right=True)
    assert row.ratios["torch"] == results.Ratio(1.0, 1.0, 1.0, right=False)
    assert row.ratios["keras"] == "failed"
    assert row.seconds["normjax"] == 0.5
    assert row.compile_s["linen"] == 0.25


def test_the_table_has_the_ratios_their_range_and_a_mark_for_what_is_wrong():
    text = render.report(LINES)
    assert "| layer tiny 4x8 f32 | 500 | 0.25 | 2.00 (0.50–4.00) | failed | 1.00, wrong |" in text
    assert "| case | normjax, ms | compile, s | linen | keras | torch |" in text
    assert "cpu: abacus, 2 CPUs, warm memory. Python 3.11, jax 0.10." in text
    assert "adds 30 ms (30–30) to the 700 ms of `import jax`, in 1 fresh processes. " in text
    assert "cpu: quill, 4 CPUs. Python 3.12, jax 0.12." in text


def test_rows_come_in_the_order_of_the_suite():
    lines = [_line("normjax", 0, [1.0], case=case) for case in reversed(CASES)]
    assert [row.key for row in results.rows(lines)] == [case.key for case in CASES]


def test_the_plot_shows_the_plotted_rows_alone(tmp_path):
    shown = next(case for case in CASES if case.plot)
    hidden = dataclasses.replace(shown, name="hidden")
    path = tmp_path / "ratios.png"
    for case, drawn in ((hidden, False), (shown, True)):
        lines = [_line(name, 0, [1.0], case=case) for name in ("normjax", "linen", "copy")]
        assert render.plot(lines, path) == drawn == path.exists()
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_import_is_timed_as_often_whatever_the_number_of_processes_and_says_where(tmp_path, monkeypatch):
    started = []

    def run(command, **options):
        started.append(command)
        return subprocess.CompletedProcess(command, 0, '{"jax_s": 0.7, "normjax_s": 0.03}')

    monkeypatch.setattr(imports.subprocess, "run", run)
    launch = _in_this_process(_field(), TINY["layer"])
    assert main(["--quick", "--processes", "1", "--rounds", "1", "--out", str(tmp_path)], launch=launch) == 0
    lines = [line for line in results.read(tmp_path / "times.jsonl") if line["kind"] == "import"]
    assert [line["process"] for line in lines] == list(range(imports.PROCESSES))
    assert len(started) == imports.PROCESSES + 1
    assert all(line["versions"]["jax"] == jax.__version__ and line["processor"] and line["cpus"] for line in lines)
    assert f"in {imports.PROCESSES} fresh processes. cpu: " in (tmp_path / "table.md").read_text()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder that the command has filled, and what it printed."""
    out = tmp_path_factory.mktemp("times")
    command = [sys.executable, "-m", "benchmarks", "--only", SMALLEST, "--against", "copy", "--out", str(out)]
    options = ["--processes", "1", "--rounds", "2"]
    return out, subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)


def test_the_command_writes_a_line_for_each_contestant_with_device_and_versions(measured):
    out, ran = measured
    assert ran.returncode == 0, ran.stderr
    lines = {line["contestant"]: line for line in results.read(out / "times.jsonl")}
    assert set(lines) == {"normjax", "copy"}
    line = lines["normjax"]
    assert line["verdict"] == "right"
    assert len(line["times_s"]) == 2
    assert min(*line["times_s"], line["compile_s"]) > 0
    assert line["cpus"] >= 1
    assert line["device"] == "cpu"
    assert line["versions"]["jax"] == jax.__version__
    assert set(line["errors"]) == {"y"}


def test_rendering_again_gives_the_same_table(measured, capsys):
    out, ran = measured
    before = (out / "table.md").read_text()
    assert before in ran.stdout
    assert main(["render", "--out", str(out)]) == 0
    assert (out / "table.md").read_text() == before


STORED = {
    "no line": ("", "holds no line"),
    "half a line": ('{"kind": "import", "jax_s": 0.7', "line 1: no line of a measurement"),
    "another file": ('{"kind": "game"}\n', "line 1: no line of a measurement"),
    "a number": ("7\n", "line 1: no line of a measurement"),
    "a line without its device": (
        '{"kind": "import", "process": 0, "jax_s": 0.7, "normjax_s": 0.1}',
        "line 1: no line",
    ),
}


@pytest.mark.parametrize(("text", "words"), STORED.values(), ids=STORED.keys())
def test_what_was_not_measured_by_the_suite_cannot_be_rendered(text, words, tmp_path, capsys):
    (tmp_path / "times.jsonl").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["render", "--out", str(tmp_path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"benchmarks: {tmp_path / 'times.jsonl'}" in error
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "table.md").exists()


def test_a_table_that_cannot_be_written_is_refused_in_a_line(measured, tmp_path, capsys):
    (tmp_path / "times.jsonl").write_text((measured[0] / "times.jsonl").read_text())
    (tmp_path / "table.md").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["render", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"benchmarks: Is a directory: '{tmp_path / 'table.md'}'\n"


@pytest.mark.parametrize("network", compiling.NETWORKS)
def test_what_is_compiled_of_each_contestant_is_the_same_gradient(network):
    gradients = []
    for by in compiling.CONTESTANTS:
        function, arguments = compiling.gradient(by, network, (4, 8), depth=3)
        leaves, structure = jax.tree.flatten(arguments)
        assert len(leaves) == 1 + 3 * {"dense": 3, "bare": 2}[network]
        values = [np.random.default_rng(i).normal(size=leaf.shape).astype(leaf.dtype) for i, leaf in enumerate(leaves)]
        gradients.append(jax.tree.leaves(jax.jit(function)(*jax.tree.unflatten(structure, values))))
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.max(np.abs(theirs)))


def test_the_seconds_of_compiling_come_as_lines_with_device_and_versions(capsys):
    compiling.main(["--network", "bare", "--by", "normjax", "--size", "4x8", "--depth", "2"])
    line = json.loads(capsys.readouterr().out)
    assert {name: line[name] for name in ("network", "shape", "depth", "contestant")} == {
        "network": "bare",
        "shape": [4, 8],
        "depth": 2,
        "contestant": "normjax",
    }
    assert line["cpu_s"] > 0
    assert line["device"] == "cpu"
    assert line["versions"]["jax"] == jax.__version__


def test_a_size_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        compiling.main(["--size", "32"])
    assert capsys.readouterr().err == "benchmarks: argument --size: '32' is no size such as 32x64\n"


def test_the_help_names_the_commands_and_says_how_allocation_is_made_equal(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for words in ("--quick", "render --out DIR", "Equal allocation", "benchmarks/requirements.txt", "times.jsonl"):
        assert words in text
