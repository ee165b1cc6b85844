"""benchmarks/deviceless reads bytes, kernels and collectives off a program's text, without any compiler."""

import pytest

from benchmarks.deviceless import __main__ as command
from benchmarks.deviceless import hlo

MODULE = """HloModule hand_written, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_slices (p.0: bf16[64,1024], p.1: f32[64]) -> f32[64] {
  %p.0 = bf16[64,1024]{1,0} parameter(0), metadata={op_name="x"}
  %wide = f32[64,1024]{1,0} convert(%p.0)
  %eighth = f32[64,128]{1,0} slice(%wide), slice={[0:64], [0:128]}
  %zero = f32[] constant(0)
  %total = f32[64]{0} reduce(%eighth, %zero), dimensions={1}, to_apply=%add
  %p.1 = f32[64]{0} parameter(1)
  ROOT %out = f32[64]{0} add(%total, %p.1)
}

%fused_pair (p.0: bf16[64,1024]) -> (f32[64], bf16[64,1024]) {
  %p.0 = bf16[64,1024]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %wide = f32[64,1024]{1,0} convert(%p.0)
  %total = f32[64]{0} reduce(%wide, %zero), dimensions={1}, to_apply=%add
  %twice = bf16[64,1024]{1,0} add(%p.0, %p.0)
  ROOT %both = (f32[64]{0}, bf16[64,1024]{1,0}) tuple(%total, %twice)
}

ENTRY %main (x: bf16[64,1024], s: f32[64]) -> (f32[64], bf16[64,1024]) {
  %x = bf16[64,1024]{1,0} parameter(0), sharding={replicated}
  %s = f32[64]{0} parameter(1), sharding={replicated}
  BODY
  ROOT %result = (f32[64]{0}, bf16[64,1024]{1,0}) tuple(%s, %x)
}
"""
X, S = 64 * 1024 * 2, 64 * 4


def counted(*body: str) -> hlo.Counts:
    return hlo.count(MODULE.replace("  BODY\n", "".join(f"  {line}\n" for line in body)))


ONE = {
    "an operation reads its operands and writes its result": (
        ["%y = bf16[64,1024]{1,0} add(%x, %x)"],
        (3 * X, 1, []),
    ),
    "parameters, constants, tuples and bitcasts move nothing": (
        ["%c = f32[] constant(1)", "%t = (f32[64]{0}) tuple(%s)", "%b = f32[64,1]{1,0} bitcast(%s)"],
        (0, 0, []),
    ),
    "of what a fusion slices, the slices count": (
        ["%y = f32[64]{0} fusion(%x, %s), kind=kInput, calls=%fused_slices"],
        (X // 8 + 2 * S, 1, []),
    ),
    "a fusion with several results writes each and reads an operand once": (
        [
            "%y = (f32[64]{0}, bf16[64,1024]{1,0}) fusion(%x), kind=kInput, calls=%fused_pair",
            "%z = bf16[64,1024]{1,0} get-tuple-element(%y), index=1",
        ],
        (2 * X + S, 1, []),
    ),
    "a slice by itself reads what it writes": (
        ["%y = bf16[64,128]{1,0} slice(%x), slice={[0:64], [0:128]}"],
        (X // 8 * 2, 1, []),
    ),
    "a buffer on the chip moves nothing": (
        ["%y = bf16[64,1024]{1,0:T(8,128)(2,1)S(1)} copy(%x)", "%z = bf16[64,1024]{1,0:T(8,128)(2,1)S(1)} negate(%y)"],
        (X, 2, []),
    ),
    "the padding of a layout's tiles moves": (
        ["%y = f32[64,1]{1,0:T(8,128)} negate(%s)", "%z = f32[64,1]{0,1:T(1,128)} negate(%s)"],
        (S + 64 * 128 * 4 + S + 128 * 4, 2, []),
    ),
    "an asynchronous copy counts once, at its start": (
        [
            "%c = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%s)",
            "%d = f32[64]{0:S(1)} copy-done(%c)",
        ],
        (S, 1, []),
    ),
    "an asynchronous slice counts once, by what it writes": (
        [
            "%c = ((bf16[64,1024]{1,0}), bf16[16,1024]{1,0}, s32[]{:S(2)}) slice-start(%x), slice={[0:16], [0:1024]}",
            "%d = bf16[16,1024]{1,0} slice-done(%c)",
        ],
        (X // 4 * 2, 1, []),
    ),
    "an all-reduce counts with its payload": (
        ["%y = f32[64]{0} all-reduce(%s), replica_groups={{0,1}}, to_apply=%add"],
        (2 * S, 1, [("all-reduce", S)]),
    ),
    "a start and its done are one collective": (
        [
            "%y = f32[64]{0} all-reduce-start(%s), replica_groups={{0,1}}, to_apply=%add",
            "%z = f32[64]{0} all-reduce-done(%y)",
        ],
        (2 * S, 1, [("all-reduce", S)]),
    ),
    "the start of an all-gather names its operand, which is no payload": (
        [
            "%y = (f32[64]{0}, f32[128]{0}) all-gather-start(%s), replica_groups={{0,1}}, dimensions={0}",
            "%z = f32[128]{0} all-gather-done(%y)",
        ],
        (3 * S, 1, [("all-gather", 2 * S)]),
    ),
    "a collective of several arrays is one, with the payload of all": (
        ["%y = (f32[64]{0}, bf16[64,1024]{1,0}) all-reduce(%s, /*index=1*/%x), to_apply=%add"],
        (2 * (S + X), 1, [("all-reduce", S + X)]),
    ),
    "a collective between buffers on the chip has its payload, padding apart": (
        [
            "%c = f32[64]{0:T(1024)S(1)} copy(%s)",
            "%y = f32[64]{0:T(1024)S(1)} all-reduce(%c), to_apply=%add",
        ],
        (S, 2, [("all-reduce", S)]),
    ),
}


@pytest.mark.parametrize(("body", "expected"), ONE.values(), ids=ONE.keys())
def test_the_counter_reads(body, expected):
    counts = counted(*body)
    assert (counts.moved, counts.kernels, counts.collectives) == expected


def test_a_collective_fused_with_other_work_is_found():
    fused = MODULE.replace("ROOT %out = f32[64]{0} add(", "ROOT %out = f32[64]{0} all-reduce(")
    line = "  %y = f32[64]{0} fusion(%x, %s), kind=kCustom, calls=%fused_slices\n"
    assert hlo.count(fused.replace("  BODY\n", line)).collectives == [("all-reduce", S)]


def test_a_loop_counts_as_often_as_it_runs_and_a_call_once():
    module = MODULE.replace("ENTRY %main", "%body") + "\nENTRY %top (x: bf16[64,1024], s: f32[64]) -> f32[64] {\n"
    module = module.replace("BODY", "%y = f32[64]{0} all-reduce(%s), to_apply=%add")
    module += "  %x = bf16[64,1024]{1,0} parameter(0)\n  %s = f32[64]{0} parameter(1)\n"
    module += "  %c = (f32[64]{0}, bf16[64,1024]{1,0}) call(%x, %s), to_apply=%body\n"
    module += "  ROOT %w = (f32[64]{0}, bf16[64,1024]{1,0}) while(%c), condition=%add, body=%body, "
    module += 'backend_config={"known_trip_count":{"n":"3"}}\n}\n'
    counts = hlo.count(module)
    assert (counts.moved, counts.kernels, counts.collectives) == (4 * 2 * S, 4, [("all-reduce", S)] * 4)


REFUSED = {
    "a loop of unknown length": ("%w = f32[64]{0} while(%s), condition=%add, body=%add", "loops a number of times"),
    "branches that differ": (
        "%w = f32[64]{0} conditional(%s, %s), branch_computations={%add, %fused_slices}",
        "branches that move different amounts",
    ),
    "a kernel": (
        '%w = f32[64]{0} custom-call(%s), custom_call_target="tpu_custom_call"',
        "calls the kernel 'tpu_custom_call'; count the bytes of its blocks",
    ),
}


@pytest.mark.parametrize(("line", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_off_the_text_is_an_error(line, words):
    with pytest.raises(ValueError, match=words):
        counted(line)


def test_a_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.count("HloModule nothing\n")


ROW = {"target": "h200", "program": "transformer", "part": "training step", "by": "vjp"}
COUNTS = {
    "moved": 1.5e6,
    "kernels": 321,
    "collectives": [("all-reduce", 2048)],
    "temporaries": 2.5e6,
    "peak": 11_250_200_000,
    "saved": None,
}


def test_the_table_has_a_column_for_every_count():
    cells = [cell.strip() for cell in command.line(ROW | COUNTS).strip("|").split("|")]
    shown = dict(zip(command.COLUMNS, cells, strict=True))
    assert shown == {
        "program": "transformer",
        "part": "training step",
        "by": "vjp",
        "moved MB": "1.5",
        "× ideal": "",
        "kernels": "321",
        "temporaries MB": "2.5",
        "peak MB": "11250.2",
        "saved MB": "",
        "collectives, bytes": "all-reduce 2048",
    }


MISTAKES = {
    "a program that is not there": (["--only", "no such"], "argument --only: no program's name contains 'no such'"),
    "no compile at a time": (["--jobs", "0"], "argument --jobs: '0' is no number from 1"),
    "no time": (["--timeout", "0"], "argument --timeout: '0' is no number from 1"),
    "a file under a file": (["--only", "rms", "--out", f"{__file__}/in"], f"Not a directory: '{__file__}/in'"),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_cannot_be_done_is_refused_before_anything_is_compiled(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(command, "version", lambda package: "1.0")
    monkeypatch.setattr(command, "measure_apart", lambda *arguments, **options: pytest.fail("compiled"))
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
