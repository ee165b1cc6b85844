"""The textbook in NumPy float64: what every test compares the library with.

Nothing of the library is used here and nothing is fast. Integer and real input is computed in float64, complex input in
complex128. Arguments are checked by ``assert`` alone, and every axis named is an axis of the array: what the library
does over mapped axes is compared with the reference on the concatenated batch.

For one group of m entries, with the names of the code in brackets::

    mu    = (1/m) sum x                      [mean]
    v     = (1/m) sum |x - mu|^2             [var]
    r     = sqrt(v + eps)                    [1 / inverse]
    x_hat = (x - mu) / r                     [standard]
    y     = gamma x_hat + beta

A loss with cotangent g = dL/dy has, with u = gamma g::

    dL/dmu = -(1/r) sum u                    dmu/dx_j = 1/m
    dL/dv  = -(1/(2 r^2)) sum u x_hat        dv/dx_j  = 2 (x_j - mu)/m
    dx_j   = (1/r) (u_j - mean(u) - x_hat_j mean(u x_hat))
    dgamma = sum g x_hat                     dbeta = sum g

Under a mask, mu and v come from the m included entries while every entry is normalised by them: the sums run over all
entries of the group, the 1/m over the included ones, and an excluded entry keeps only its own term u_j / r. Without
centring, mu is 0 and v the mean square, and mean(u) drops out. Frozen statistics leave dx_j = u_j / r.
"""

import math
import re

import numpy as np

Names = str | tuple[str, ...] | list[str]

# NaN and infinity are answers here, not accidents.
_QUIET = np.errstate(invalid="ignore", over="ignore", divide="ignore")

_AXIS = re.compile(r"(?:([^\s()=]+)=)?\(([^()]*)\)|([^\s()=]+)")


@_QUIET
def moments(x, *, layout: str, axis_names: Names, center: bool = True, where=None):
    """Mean, variance and number of the entries of each group, over the kept axes of ``x``.

    A group without an entry has mean 0, variance 0 and count 0. With ``center=False`` the mean is 0 and the variance
    the mean square.
    """
    x = _wide(x)
    layout_axes = _parse(layout, x.shape)
    reduced = _factors(layout_axes, axis_names)
    kept = [name for name in _sizes(layout_axes) if name not in reduced]
    rows = _as_rows(layout_axes, x, kept, reduced)
    included = _as_rows(layout_axes, _included(where, x.shape), kept, reduced)

    mean = np.zeros(len(rows), x.dtype)
    var = np.zeros(len(rows))
    count = np.zeros(len(rows))
    for group in range(len(rows)):
        entries = rows[group][included[group]]
        m = entries.size
        if m == 0:
            continue
        if center:
            # Counted from the first entry, so that equal entries have exactly that mean, and variance 0.
            mean[group] = entries[0] + np.sum(entries - entries[0]) / m
        var[group] = np.sum(np.abs(entries - mean[group]) ** 2) / m
        count[group] = m
    shape = _shape(layout_axes, _kept_axes(layout_axes, reduced))
    return mean.reshape(shape), var.reshape(shape), count.reshape(shape)


@_QUIET
def normalize(
    x,
    scale=None,
    bias=None,
    *,
    names: Names = (),
    layout: str,
    axis_names: Names,
    center: bool = True,
    where=None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    mean=None,
    var=None,
    stat_names: Names | None = None,
):
    """``scale · (x − mean)/√(var + eps) + bias``, of the shape of ``x``.

    Args:
        x: The array.
        scale: One number for each place along ``names``, in that order; with ``zero_centered`` one less than it.
        bias: The same for the bias.
        names: The layout axes along which ``scale`` and ``bias`` run; none: scalars.
        layout: The names of the axes of ``x``.
        axis_names: The names whose entries share a mean; not looked at with ``stat_names`` given.
        center: Whether the mean is subtracted.
        where: Which entries the statistics come from; all entries are normalised.
        eps: Added to the variance. With 0, a group of variance 0 gives the bias.
        zero_centered: Whether 1 is added to ``scale``.
        mean: Frozen statistics to use in place of the array's own, with ``var``.
        var: See ``mean``.
        stat_names: The layout axes along which ``mean`` and ``var`` run; None: the kept axes, as ``moments`` has them.
    """
    x = _wide(x)
    layout_axes = _parse(layout, x.shape)
    standard, _, _ = _standardize(x, layout_axes, layout, axis_names, center, where, eps, mean, var, stat_names)
    y = standard
    if scale is not None:
        y = y * _spread(layout_axes, _wide(scale) + (1 if zero_centered else 0), names)
    if bias is not None:
        y = y + _spread(layout_axes, _wide(bias), names)
    return y.reshape(x.shape)


@_QUIET
def backward(
    x,
    g,
    scale=None,
    bias=None,
    *,
    names: Names = (),
    layout: str,
    axis_names: Names,
    center: bool = True,
    where=None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    mean=None,
    var=None,
    stat_names: Names | None = None,
):
    """The cotangents ``(dx, dscale, dbias)`` of ``normalize`` for the cotangent ``g`` of its output.

    ``dscale`` is None without ``scale`` and ``dbias`` without ``bias``. An excluded entry that is NaN or infinite takes
    no part in any of them, whatever its ``g``. Frozen statistics are constants. The arguments are ``normalize``'s.
    """
    x = _wide(x)
    g = _wide(g)
    assert g.shape == x.shape
    assert not np.iscomplexobj(x)
    layout_axes = _parse(layout, x.shape)
    sizes = tuple(_sizes(layout_axes).values())
    standard, inverse, m = _standardize(x, layout_axes, layout, axis_names, center, where, eps, mean, var, stat_names)

    included = _included(where, x.shape).reshape(sizes)
    takes_part = included | np.isfinite(x.reshape(sizes))
    g = np.where(takes_part, g.reshape(sizes), 0.0)
    standard = np.where(takes_part, standard, 0.0)
    gamma = 1.0 if scale is None else _spread(layout_axes, _wide(scale) + (1 if zero_centered else 0), names)
    # Zeroed a second time, since a scale may run along the very entry and be NaN there.
    u = np.where(takes_part, gamma * g, 0.0)
    dx = u * inverse
    if mean is None:
        reduced = _factors(layout_axes, axis_names)
        axes = tuple(i for i, name in enumerate(_sizes(layout_axes)) if name in reduced)
        m = np.maximum(m, 1)  # a group without an entry has no included entry to give the shared terms to
        through_mean = inverse * np.sum(u, axis=axes, keepdims=True) / m
        through_var = inverse * standard * np.sum(u * standard, axis=axes, keepdims=True) / m
        if center:
            dx = dx - np.where(included, through_mean, 0.0)
        dx = dx - np.where(included, through_var, 0.0)
    dx = np.where(takes_part, dx, 0.0)
    dscale = None if scale is None else _gather(layout_axes, g * standard, names)
    dbias = None if bias is None else _gather(layout_axes, g, names)
    return dx.reshape(x.shape), dscale, dbias


@_QUIET
def update(
    mean,
    var,
    weight,
    batch_mean,
    batch_var,
    batch_count,
    *,
    rule: str,
    new_weight: float = 0.1,
    unbiased: bool = False,
    extra_axes: tuple[int, ...] = (),
):
    """Running ``(mean, var, weight)`` after one batch: ``r + (a/w')(batch − r)``.

    ===================== ================ =======================
    rule                  a                w', the new weight
    ===================== ================ =======================
    "ema"                 new_weight       1
    "ema_debiased"        new_weight       (1 − new_weight) w + new_weight
    "cumulative_entries"  entries seen     w + entries seen
    "cumulative_updates"  1                w + 1
    ===================== ================ =======================

    ``unbiased`` multiplies each group's variance by m/(m−1), a group of one entry excepted. ``extra_axes`` are the axes
    of the batch's arrays that the running ones lack: they are averaged, each group counting by its entries. A feature
    that saw no entry stays as it was.
    """
    mean, var, weight = _wide(mean), _wide(var), _wide(weight)
    batch_mean, batch_var, m = _wide(batch_mean), _wide(batch_var), _wide(batch_count)
    if unbiased:
        batch_var = batch_var * np.where(m > 1, m / np.maximum(m - 1, 1), 1.0)

    entries = np.sum(m, axis=extra_axes)
    seen = entries > 0
    batch_mean = np.sum(m * batch_mean, axis=extra_axes) / np.maximum(entries, 1)
    batch_var = np.sum(m * batch_var, axis=extra_axes) / np.maximum(entries, 1)
    assert mean.shape == var.shape == weight.shape == entries.shape

    a, total = {
        "ema": (new_weight, np.ones_like(weight)),
        "ema_debiased": (new_weight, (1 - new_weight) * weight + new_weight),
        "cumulative_entries": (entries, weight + entries),
        "cumulative_updates": (1.0, weight + 1),
    }[rule]
    step = np.where(seen, a / np.where(seen & (total > 0), total, 1.0), 0.0)
    new_mean = np.where(seen, mean + step * (batch_mean - mean), mean)
    new_var = np.where(seen, var + step * (batch_var - var), var)
    return new_mean, new_var, np.where(seen, total, weight)


@_QUIET
def merge(means, variances, counts):
    """Mean, variance and count of the groups along axis 0 pooled into one; without any entry, zeros."""
    means, variances, counts = _wide(means), _wide(variances), _wide(counts)
    count = np.sum(counts, axis=0)
    divisor = np.maximum(count, 1)
    mean = np.sum(counts * means, axis=0) / divisor
    var = np.sum(counts * (variances + np.abs(means - mean) ** 2), axis=0) / divisor
    return mean, var, count


def _standardize(x, layout_axes, layout, axis_names, center, where, eps, mean, var, stat_names):
    """Standardised x, 1/√(var + eps) and the count (None when frozen), with one axis for each factor of the layout."""
    assert (mean is None) == (var is None)
    sizes = tuple(_sizes(layout_axes).values())
    count = None
    if mean is None or stat_names is None:
        stat_names = _kept_axes(layout_axes, _factors(layout_axes, axis_names))
    if mean is None:
        mean, var, count = moments(x, layout=layout, axis_names=axis_names, center=center, where=where)
        count = _spread(layout_axes, count, stat_names)
    mean = _spread(layout_axes, _wide(mean), stat_names)
    var = _spread(layout_axes, _wide(var), stat_names)

    inverse = 1 / np.sqrt(var + eps)
    inverse = np.where(var + eps == 0, 0.0, inverse)
    # An infinite variance is one that overflowed: the answer is not known, which 0 would hide.
    inverse = np.where(np.isinf(var + eps), np.nan, inverse)
    if count is not None:
        inverse = np.where(count == 0, 0.0, inverse)
    # Not a product with 0: a group that gives the bias gives it for an excluded NaN as well.
    standard = np.where(inverse == 0, 0.0, (x.reshape(sizes) - mean) * inverse)
    return standard, inverse, count


def _wide(array) -> np.ndarray:
    """The array in float64, or complex128 where it is complex."""
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _included(where, shape: tuple[int, ...]) -> np.ndarray:
    """The mask of the shape of x."""
    if where is None:
        return np.ones(shape, bool)
    where = np.asarray(where)
    assert where.dtype == bool
    assert where.ndim == len(shape)
    return np.broadcast_to(where, shape)


def _parse(layout: str, shape: tuple[int, ...]) -> dict[str, dict[str, int]]:
    """The array axes by name, in order; each is a dict of the sizes of its factors, itself alone where it is not split.

    ``"N ... C=(G=2 K)"`` of shape (5, 7, 6) is ``{"N": {"N": 5}, "...0": {"...0": 7}, "C": {"G": 2, "K": 3}}``.
    """
    tokens = _AXIS.findall(layout)
    unnamed = len(shape) - sum(plain != "..." for _, _, plain in tokens)
    layout_axes = {}
    left = list(shape)
    for own, split, plain in tokens:
        if plain == "...":
            for i in range(unnamed):
                layout_axes[f"...{i}"] = {f"...{i}": left.pop(0)}
        elif plain:
            layout_axes[plain] = {plain: left.pop(0)}
        else:
            layout_axes[own or f"({split})"] = _split_sizes(split, left.pop(0))
    assert not left, f"layout {layout!r} does not name every axis of shape {shape}"
    assert len(layout_axes) == len(shape), f"layout {layout!r} gives a name twice"
    assert len(_sizes(layout_axes)) == sum(map(len, layout_axes.values())), f"layout {layout!r} gives a name twice"
    return layout_axes


def _split_sizes(split: str, size: int) -> dict[str, int]:
    """The factors of one axis and their sizes; the one left out is what the others leave."""
    factors = [factor.partition("=") for factor in split.split()]
    known = math.prod(int(number) for _, _, number in factors if number)
    sizes = {name: int(number) if number else size // known for name, _, number in factors}
    assert math.prod(sizes.values()) == size, f"({split}) does not multiply to {size}"
    return sizes


def _sizes(layout_axes) -> dict[str, int]:
    """The size of every factor of the layout, in order."""
    return {name: size for factors in layout_axes.values() for name, size in factors.items()}


def _factors(layout_axes, names: Names) -> list[str]:
    """The factors that names stand for, in the order named: ``...`` is the unnamed axes, a split axis all of its."""
    factors = []
    for name in names.split() if isinstance(names, str) else names:
        if name == "...":
            factors += [axis for axis in layout_axes if axis.startswith("...")]
        elif name in layout_axes:
            factors += list(layout_axes[name])
        else:
            assert name in _sizes(layout_axes), f"{name!r} is no axis of {layout_axes}"
            factors.append(name)
    assert len(set(factors)) == len(factors)
    return factors


def _kept_axes(layout_axes, reduced: list[str]) -> list[str]:
    """The names of the axes of statistics: an axis all of whose factors are kept is one again."""
    names = []
    for axis, factors in layout_axes.items():
        kept = [factor for factor in factors if factor not in reduced]
        names += [axis] if len(kept) == len(factors) else kept
    return names


def _shape(layout_axes, names: Names) -> tuple[int, ...]:
    """The shape of an array that runs along names: one axis for each name, several or none for ``...``."""
    sizes = _sizes(layout_axes)
    shape = []
    for name in names.split() if isinstance(names, str) else names:
        factors = [sizes[factor] for factor in _factors(layout_axes, [name])]
        shape += factors if name == "..." else [math.prod(factors)]
    return tuple(shape)


def _as_rows(layout_axes, array: np.ndarray, kept: list[str], reduced: list[str]) -> np.ndarray:
    """The array, of the shape of x, as a table with one row for each group."""
    sizes = _sizes(layout_axes)
    order = [list(sizes).index(name) for name in kept + reduced]
    rows, columns = (math.prod(sizes[name] for name in part) for part in (kept, reduced))
    return array.reshape(tuple(sizes.values())).transpose(order).reshape(rows, columns)


def _spread(layout_axes, array: np.ndarray, names: Names) -> np.ndarray:
    """An array that runs along names, with one axis for each factor of the layout: size 1 where it does not run."""
    assert array.shape == _shape(layout_axes, names), f"{array.shape} is not {_shape(layout_axes, names)} of {names}"
    sizes = _sizes(layout_axes)
    factors = _factors(layout_axes, names)
    array = array.reshape([sizes[name] for name in factors])
    array = array.transpose([factors.index(name) for name in sizes if name in factors])
    return array.reshape([size if name in factors else 1 for name, size in sizes.items()])


def _gather(layout_axes, array: np.ndarray, names: Names) -> np.ndarray:
    """The sum of an array with one axis for each factor over all that names do not name: the transpose of spread."""
    sizes = _sizes(layout_axes)
    factors = _factors(layout_axes, names)
    total = np.sum(array, axis=tuple(i for i, name in enumerate(sizes) if name not in factors))
    left = [name for name in sizes if name in factors]
    return total.transpose([left.index(name) for name in factors]).reshape(_shape(layout_axes, names))
