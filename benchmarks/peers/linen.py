"""flax.linen, with its default variance E[x²] − E[x]²; "two-pass" is ``use_fast_variance=False``."""

from flax import linen as nn

from benchmarks.cases import Case
from benchmarks.contestants import Apply, in_jax
from benchmarks.problems import EPS, NEW_WEIGHT


def build(case: Case, fast: bool = True) -> Apply:
    """The module's ``apply`` with the given parameters."""
    options = {"epsilon": EPS, "dtype": case.dtype, "use_fast_variance": fast}
    if case.family == "batch":
        module = nn.BatchNorm(not case.train, axis=case.channel_axis, momentum=1 - NEW_WEIGHT, **options)
    elif case.family == "group":
        module = nn.GroupNorm(case.groups, **options)
    else:
        module = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "instance": nn.InstanceNorm}[case.family](**options)

    def apply(x, scale, bias, mean, var, where):
        variables = {"params": {"scale": scale} if bias is None else {"scale": scale, "bias": bias}}
        if case.family != "batch":
            return module.apply(variables, x, mask=where), None
        variables["batch_stats"] = {"mean": mean, "var": var}
        if not case.train:
            return module.apply(variables, x), None
        y, new = module.apply(variables, x, mask=where, mutable="batch_stats")
        return y, (new["batch_stats"]["mean"], new["batch_stats"]["var"])

    return apply


def _build_two_pass(case: Case) -> Apply | None:
    return build(case, fast=False) if 103 in case.numbers else None


prepare = in_jax(build)
prepare_two_pass = in_jax(_build_two_pass)
