"""The faults of `python -m tests.mutants` still apply, and its verdicts mean what they say; the run itself is long."""

import ast
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_fault_applies_once_and_changes_the_program(mutant, tmp_path):
    original = (mutants.ROOT / mutant.file).read_text()
    copy = tmp_path / mutant.file
    copy.parent.mkdir()
    copy.write_text(original)
    mutant.apply(tmp_path)
    assert ast.dump(ast.parse(copy.read_text())) != ast.dump(ast.parse(original))


def test_names_are_distinct_and_the_first_tests_exist():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert (mutants.ROOT / mutant.first[0]).exists(), mutant.name


@pytest.mark.parametrize("text", ["nothing of the kind\n", "a = 1\na = 1\n"])
def test_a_fault_whose_text_is_gone_or_stands_twice_is_refused(text, tmp_path):
    (tmp_path / "module.py").write_text(text)
    with pytest.raises(ValueError, match="not once"):
        Mutant("fault", "module.py", "a = 1", "a = 2", ()).apply(tmp_path)


@pytest.fixture
def little(tmp_path, monkeypatch):
    """A repository of one module in place of this one: its name, so that the runs take no time."""

    def build(test: str, module: str = "a = 1\n"):
        (tmp_path / "normjax.py").write_text(module)
        (tmp_path / "test_it.py").write_text(test)

        def copy(to: Path) -> Path:
            for name in ("normjax.py", "test_it.py"):
                (to / name).write_text((tmp_path / name).read_text())
            return to

        monkeypatch.setattr(mutants, "copy_repository", copy)
        monkeypatch.setattr(
            mutants, "MUTANTS", [Mutant("one for two", "normjax.py", "a = 1", "a = 2", ("test_it.py",))]
        )

    return build


@pytest.mark.parametrize(
    ("test", "status", "words"),
    [
        ("import normjax\ndef test_a(): assert normjax.a == 1\n", 0, "1 of 1 mutants killed"),
        ("import normjax\ndef test_a(): assert normjax.a > 0\n", 1, "0 of 1 mutants killed\nlives: one for two"),
        ("import normjax\ndef test_a(): assert normjax.a == 3\n", 2, "refused: the unchanged copy fails"),
        ("import nowhere\n", 2, "refused: pytest could not run"),
        ("import normjax\nassert normjax.a == 1\ndef test_a(): pass\n", 2, "refused: pytest could not run"),
    ],
    ids=["killed", "lives", "red before", "cannot be collected", "cannot be collected with the fault"],
)
def test_only_a_failing_test_on_a_green_suite_kills(test, status, words, little, capsys):
    little(test)
    assert mutants.main([]) == status
    printed = capsys.readouterr()
    assert words in printed.out + printed.err


def test_words_choose_the_faults(little, capsys):
    little("def test_a(): pass\n")
    assert mutants.main(["nothing"]) == 2
    assert "no fault's name holds nothing" in capsys.readouterr().err
