"""The grammar of layout and axis_names: what can be said, before there is an array to say it of."""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, NoReturn

ELLIPSIS = "..."
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_MOST_DIGITS = 18  # of a size: no axis has 10¹⁸ entries
_TOKEN = re.compile(r"(?:[^\s()=]*=)?\([^()]*\)|[^\s()]+")


def count_word(n: int) -> str:
    """3 → "three"."""
    return _WORDS[n] if 0 <= n < len(_WORDS) else str(n)


def axes_phrase(n: int) -> str:
    """1 → "one axis", 4 → "four axes"."""
    return f"{count_word(n)} {'axis' if n == 1 else 'axes'}"


def quote(names: Iterable[str]) -> str:
    """("H", "W") → "'H', 'W'"."""
    return ", ".join(repr(name) for name in names)


def one_form(name: str) -> str:
    """The name in the Unicode form that Python gives the names of arguments: é is one character there, µ is μ."""
    return name if name.isascii() else unicodedata.normalize("NFKC", name)


def in_another_form(name: str, known: Iterable[str]) -> str:
    """For errors: that a known name looks the same but is spelled otherwise; "" where none does."""
    theirs = next((other for other in known if other != name and one_form(other) == one_form(name)), None)
    if theirs is None:
        return ""
    return (
        f" Two Unicode forms of one name: {theirs!a} there, {name!a} here; write {one_form(name)!a} in both, "
        "as Python does in the names of arguments."
    )


@dataclasses.dataclass(frozen=True)
class Axis:
    """One array axis as the layout writes it: its own name, if any, and a split axis' factors with their sizes."""

    name: str | None
    factors: tuple[tuple[str, int | None], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the axis brings: its own and its factors'."""
        own = () if self.name is None else (self.name,)
        return own + tuple(name for name, _ in self.factors)

    def __str__(self) -> str:
        inner = " ".join(name if size is None else f"{name}={size}" for name, size in self.factors)
        return self.name or "" if not inner else f"{self.name}=({inner})" if self.name else f"({inner})"


@functools.lru_cache(maxsize=512)
def parse_layout(fn: str, layout: str) -> tuple[Axis, ...]:
    """The axes of a layout; raises ValueError, in the name of `fn`, where it breaks the grammar."""

    def fail(rule: str) -> NoReturn:
        raise ValueError(f'{fn}: layout="{layout}": {rule}')

    if re.search(r"[()]", re.sub(r"\([^()]*\)", "", layout)):
        fail('its parentheses do not pair up, or nest; a split axis is written "C=(G=32 K)" or "(G=32 K)".')
    if glued := re.search(r"[^\s=(]+\(|\)\S+", re.sub(r"\s*=\s*", "=", layout)):
        fail(f"separate axes by spaces; '{glued.group()}' runs two into one.")
    axes = []
    for token in _TOKEN.findall(re.sub(r"\s*=\s*", "=", layout)):
        if token == ELLIPSIS:
            axes.append(Axis(ELLIPSIS))
        elif token.endswith(")"):
            own, inner = token[:-1].split("(", 1)
            if own == "=":
                fail(f'\'{token}\' has no name before its =; a split axis is written "C=(G=32 K)" or "(G=32 K)".')
            own = own.removesuffix("=")
            if own:
                _check_name(own, fail)
            axes.append(Axis(own or None, _parse_factors(inner, fail)))
        elif "=" in token:
            fail(f"sizes stand only inside parentheses, as in \"C=(G=32 K)\"; '{token}' gives one to a plain axis.")
        else:
            _check_name(token, fail)
            axes.append(Axis(token))
    names = [one_form(name) for axis in axes for name in axis.names]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        fail(f"{quote(twice)} stands twice; every axis and factor needs a name of its own.")
    return tuple(axes)


def _parse_factors(inner: str, fail) -> tuple[tuple[str, int | None], ...]:
    factors = []
    for token in inner.split():
        name, _, size = token.partition("=")
        _check_name(name, fail)
        if size.isdecimal() and len(size) > _MOST_DIGITS:
            fail(f"the size of factor '{name}' has {len(size)} digits, more than any axis has.")
        if "=" in token and not (size.isdecimal() and int(size) > 0):
            fail(f"the size of factor '{name}' must be a positive integer, not '{size}'.")
        factors.append((name, int(size) if size else None))
    if not factors:
        fail('a split axis needs at least one factor inside its parentheses, as in "C=(G=32 K)".')
    if sum(size is None for _, size in factors) > 1:
        open_ = [name for name, size in factors if size is None]
        fail(f"at most one factor of a split axis leaves its size out; {quote(open_)} do.")
    return tuple(factors)


def _check_name(name: str, fail) -> None:
    if not name.isidentifier():
        fail(f"'{name}' is not a name; names are words such as N or time, separated by spaces.")


def parse_names(fn: str, axis_names: Any, argument: str = "axis_names") -> tuple[str, ...]:
    """The names of a reduction spec: `"N H W data"` or an iterable of names."""
    if isinstance(axis_names, str):
        names = tuple(axis_names.split())
    elif isinstance(axis_names, Iterable):
        names = tuple(axis_names)
    else:
        raise TypeError(f'{fn}: {argument} must be a string such as "N H W" or a tuple of names; got {axis_names!r}.')
    asked = f'{fn}: {argument}="{" ".join(map(str, names))}"'
    if not names:
        raise ValueError(f"{asked} names no axis; name the axes whose entries share a mean.")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{asked}: names are strings; got {name!r}.")
        if name != ELLIPSIS and not name.isidentifier():
            raise ValueError(f"{asked}: '{name}' is not a name; separate names by spaces.")
    forms = [one_form(name) for name in names]
    if twice := [name for name in dict.fromkeys(forms) if forms.count(name) > 1]:
        raise ValueError(f"{asked}: {quote(twice)} is given twice.")
    return names
