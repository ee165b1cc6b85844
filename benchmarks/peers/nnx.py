"""flax.nnx, its modules merged inside the compiled program; called eagerly, the module itself."""

from flax import nnx

from benchmarks.cases import Case
from benchmarks.contestants import Apply, in_jax
from benchmarks.problems import EPS, NEW_WEIGHT


def _module(case: Case) -> nnx.Module:
    options = {"epsilon": EPS, "dtype": case.dtype, "rngs": nnx.Rngs(0)}
    if case.family == "batch":
        mode = {"use_running_average": not case.train, "momentum": 1 - NEW_WEIGHT}
        return nnx.BatchNorm(case.channels, axis=case.channel_axis, **mode, **options)
    if case.family == "group":
        return nnx.GroupNorm(case.channels, num_groups=case.groups, **options)
    kind = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm, "instance": nnx.InstanceNorm}[case.family]
    return kind(case.channels, **options)


def build(case: Case) -> Apply:
    """A module whose parameters and statistics are set, then called."""
    own = _module(case)
    graph, state = nnx.split(own)

    def apply(x, scale, bias, mean, var, where):
        module = own if case.eager and not case.backward else nnx.merge(graph, state, copy=True)
        module.scale.set_value(scale)
        if bias is not None:
            module.bias.set_value(bias)
        if case.family != "batch":
            return module(x, mask=where), None
        module.mean.set_value(mean)
        module.var.set_value(var)
        y = module(x, mask=where)
        return y, (module.mean.get_value(), module.var.get_value()) if case.train else None

    return apply


prepare = in_jax(build)
