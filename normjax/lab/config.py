"""Configuration: TOML, overridden key by key, becomes frozen dataclasses; what does not fit is a UserError."""

import dataclasses
import datetime
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normjax._grammar import Axis, parse_layout
from normjax.lab.errors import UserError

# What a family pools by default, so that `--norm.family group` alone names a whole layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "batch": {"layout": "N H W C", "axis_names": "N H W", "bias": True},
    "layer": {"layout": "N H W C", "axis_names": "H W C", "bias": True},
    "instance": {"layout": "N H W C", "axis_names": "H W", "bias": True},
    "group": {"layout": "N H W C=(G=8 K)", "axis_names": "H W K", "bias": True},
    "rms": {"layout": "N H W C", "axis_names": "H W C", "bias": False},
    "none": {"layout": "N H W C", "axis_names": "", "bias": True},
}
DERIVATIVES = ("vjp", "jvp", "autodiff")
KINDS = ("pure", "linen", "nnx")
DEVICE_AXIS = "data"  # the mapped axis over which a batch is split, as norm.axis_names calls it
_MAX_SEED = 2**31 - 1
_MAX_DEVICES = 4096


def _key(default: Any, doc: str, *, short: str | None = None) -> Any:
    """A dataclass field that carries the line `--help` shows for it, and a shorter name on the command line."""
    return field(default=default, metadata={"doc": doc, "short": short})


@dataclass(frozen=True)
class DataConfig:
    """The images: scikit-learn's 1797 digits of 8 × 8 pixels."""

    held_out: float = _key(0.2, "fraction of the images held out for evaluation; the split is the same for every seed")


@dataclass(frozen=True)
class ModelConfig:
    """The network: blocks of convolution, norm and relu, then one dense layer."""

    features: tuple[int, ...] = _key((32, 64), "channels of each 3 x 3 convolution, one block each")
    kind: str = _key(
        "pure",
        "one of " + ", ".join(KINDS) + ": norms as functions, or as the modules of normjax.linen or normjax.nnx",
        short="model",
    )


@dataclass(frozen=True)
class NormConfig:
    """The norm after each convolution; its arrays are (example, height, width, channel)."""

    family: str = _key("batch", "one of " + ", ".join(FAMILIES) + "; given here alone, it brings its layout and axes")
    layout: str = _key("N H W C", "names of the four axes, in order; C=(G=8 K) splits the channels into 8 groups")
    axis_names: str = _key("N H W", f"the names whose entries share one mean; {DEVICE_AXIS}: over devices too")
    channel: str = _key("C", "the layout's name for the channel axis, along which scale and bias run")
    scale: bool = _key(True, "learn a scale")
    bias: bool = _key(True, "learn a bias")
    eps: float = _key(1e-5, "added to the variance")
    new_weight: float = _key(0.1, "weight of the new batch in the running statistics (batch)")
    unbiased: bool = _key(False, "running variance with divisor m - 1 (batch)")
    debias: bool = _key(False, "running averages without the pull of their start values (batch)")
    derivative: str = _key("vjp", "one of " + ", ".join(DERIVATIVES))

    @property
    def keeps_statistics(self) -> bool:
        """Whether this family evaluates with running statistics."""
        return self.family == "batch"

    @property
    def is_synchronised(self) -> bool:
        """Whether means run over devices too."""
        in_layout = {name for axis in self._axes() for name in axis.names}
        return DEVICE_AXIS in self.axis_names.split() and DEVICE_AXIS not in in_layout

    @property
    def pools_examples(self) -> tuple[bool, bool]:
        """Whether means run over any examples, and over all: over the layout's first axis, which may be split."""
        first = next(iter(self._axes()), Axis(None))
        pooled, parts = set(self.axis_names.split()), {name for name, _ in first.factors} or set(first.names)
        every = first.name in pooled or parts <= pooled
        return every or not parts.isdisjoint(pooled), every

    def _axes(self) -> tuple[Axis, ...]:
        """The layout's axes; none where it breaks the grammar, of which the norm complains when it is built."""
        try:
            return parse_layout("norm.layout", self.layout)
        except ValueError:
            return ()


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation: AdamW with a cosine decay to zero."""

    epochs: int = _key(12, "passes over the training images")
    batch_size: int = _key(64, "images per step; what is left over at the end of an epoch is dropped")
    learning_rate: float = _key(3e-3, "at the first step")
    weight_decay: float = _key(1e-3, "of every parameter but the scales and biases of norms")


@dataclass(frozen=True)
class Config:
    """One run, in full."""

    seed: int = _key(0, "of the initial parameters and of the order of the images")
    devices: int = _key(1, "how many devices split each batch between them; a machine without accelerator makes them")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    norm: NormConfig = field(default_factory=NormConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


# The tables of a config file; the keys that stand above them come under the empty name.
TABLES: dict[str, type] = {
    "": Config,
    "data": DataConfig,
    "model": ModelConfig,
    "norm": NormConfig,
    "train": TrainConfig,
}
# Names that Affine.init and BatchStats.init keep for themselves.
_NOT_A_CHANNEL = ("scale", "bias", "scale_init", "dtype", "zero_centered")


def _fields(table: str) -> dict[str, dataclasses.Field]:
    """A table's own keys."""
    return {f.name: f for f in dataclasses.fields(TABLES[table]) if "doc" in f.metadata}


def _hints(table: str) -> dict[str, Any]:
    """Types of a table's own keys."""
    hints = typing.get_type_hints(TABLES[table])
    return {name: hints[name] for name in _fields(table)}


def all_keys() -> dict[str, dataclasses.Field]:
    """Every key, dotted as on the command line."""
    return {_dot(table, name): f for table in TABLES for name, f in _fields(table).items()}


def presets_dir() -> Path:
    """Where the presets lie: inside the installed package, or in the `configs` folder of a checkout."""
    installed = Path(__file__).parent / "presets"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def presets() -> list[str]:
    """Names of the presets, those with the shortest names first."""
    return sorted((path.stem for path in presets_dir().glob("*.toml")), key=lambda name: (len(name.split("-")), name))


def load(source: str, overrides: Mapping[str, str] | None = None) -> Config:
    """A config from a preset's name or a path, with overrides from the command line.

    Args:
        source: a preset's name, or a path of a TOML file (told by its `.toml` or by a separator).
        overrides: text by dotted key, such as `{"norm.family": "group"}`.

    Returns:
        The checked config, with every key filled in.

    Raises:
        UserError: whatever is wrong, in one line.
    """
    is_path = source.endswith(".toml") or "/" in source or "\\" in source
    if not is_path and source not in presets():
        raise UserError(
            f"unknown preset {source!r}; the presets are {', '.join(presets())}; a path of a file ends in .toml"
        )
    return resolve(_read(Path(source) if is_path else presets_dir() / f"{source}.toml"), source, overrides or {})


def _read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a preset ({', '.join(presets())}) or a path of a file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not TOML: {error}; mend that place of the file") from None
    except RecursionError:
        raise UserError(f"{path}: nests lists or tables too deep to read; no key needs a list of lists") from None
    except ValueError:  # Python reads no decimal number of more than some thousand digits
        raise UserError(f"{path}: holds a number too long to read; write it with fewer digits") from None


def resolve(raw: Mapping[str, Any], source: str, overrides: Mapping[str, str]) -> Config:
    """The config of nested tables `raw`, which came from `source`, after overrides."""
    tree = _by_table(raw, source)
    given = _parse_overrides(overrides)
    if "norm.family" in given:
        # The file's layout and axes belong to the file's family; a new family brings its own.
        for name in ("layout", "axis_names", "bias"):
            tree["norm"].pop(name, None)
    for key, value in given.items():
        table, _, name = key.rpartition(".")
        tree[table][name] = value
    family = tree["norm"].get("family", "batch")
    if isinstance(family, str):
        tree["norm"] = FAMILIES.get(family, {}) | tree["norm"]
    typed = {
        table: {
            name: _typed(value, _hints(table)[name], source, _dot(table, name)) for name, value in tree[table].items()
        }
        for table in TABLES
    }
    config = Config(**typed[""], **{table: cls(**typed[table]) for table, cls in TABLES.items() if table})
    _check(config, source)
    return config


def _by_table(raw: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """The keys of each table, all of them known."""
    tree: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for name, value in raw.items():
        if isinstance(value, dict) and name not in TABLES:
            raise UserError(f"{source}: unknown table [{name}]; the tables are {', '.join(t for t in TABLES if t)}")
        if name in TABLES and not isinstance(value, dict):
            raise UserError(f"{source}: {name} must be a table, [{name}], not {shown(value)}")
        tree[name if isinstance(value, dict) else ""] |= value if isinstance(value, dict) else {name: value}
    for table, values in tree.items():
        for name in values:
            if name not in _fields(table):
                where = f"[{table}]" if table else "the top level"
                known = ", ".join(_fields(table))
                raise UserError(f"{source}: unknown key {_dot(table, name)}; the keys of {where} are {known}")
    return tree


def _parse_overrides(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Values of the command line's texts, each read as its key's type."""
    hints = {_dot(table, name): hint for table in TABLES for name, hint in _hints(table).items()}
    parsed = {}
    for key, text in overrides.items():
        if key not in hints:
            raise UserError(f"--{key}: unknown key; the keys are {', '.join(hints)}")
        try:
            parsed[key] = _from_text(text, hints[key])
        except ValueError:
            raise UserError(f"--{key}: expected {_describe(hints[key])}, not {shown(text)}") from None
    return parsed


def _from_text(text: str, hint: Any) -> Any:
    """One value from the command line; ValueError where it does not read as `hint`."""
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if hint in (int, float):
        return hint(text)
    if hint is str:
        return text
    return [int(part) for part in text.replace(",", " ").split()]


def _typed(value: Any, hint: Any, source: str, key: str) -> Any:
    """`value` as `hint`; a whole number is a float too, but a boolean is never a number."""
    if hint is float and type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # as the same digits with a point; no key may be infinite
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if hint == tuple[int, ...] and isinstance(value, list | tuple) and all(type(v) is int for v in value):
        return tuple(value)
    raise UserError(f"{source}: {key} must be {_describe(hint)}, not {shown(value)}")


def _describe(hint: Any) -> str:
    """A type, in words."""
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        hint, "whole numbers (16,32 on the command line, [16, 32] in a file)"
    )


def shown(value: Any) -> str:
    """A value as a TOML file has it, short enough for one line: 0.5, true, [16, 32], 'batch'."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{...}"
    if isinstance(value, list | tuple):
        text = f"[{', '.join('[...]' if isinstance(item, list | tuple) else shown(item) for item in value)}]"
    elif isinstance(value, int) and value.bit_length() > 200:  # Python prints no number of thousands of digits
        return f"a number of about {round(value.bit_length() * math.log10(2))} digits"
    else:
        text = value.isoformat() if isinstance(value, datetime.date | datetime.time) else repr(value)
    return text if len(text) <= 80 else f"{text[:38]} ... {text[-38:]}"


def _check(config: Config, source: str) -> None:
    """Ranges, one rule a line: key, value, whether it holds, what would."""
    norm, train, features, kind = config.norm, config.train, config.model.features, config.model.kind
    rules = [
        ("seed", config.seed, 0 <= config.seed <= _MAX_SEED, f"between 0 and {_MAX_SEED}"),
        ("devices", config.devices, 1 <= config.devices <= _MAX_DEVICES, f"between 1 and {_MAX_DEVICES}"),
        ("data.held_out", config.data.held_out, 0.01 <= config.data.held_out <= 0.9, "between 0.01 and 0.9"),
        (
            "model.features",
            list(features),
            1 <= len(features) <= 8 and all(1 <= f <= 4096 for f in features),
            "1 to 8 channel counts, each between 1 and 4096",
        ),
        ("model.kind", kind, kind in KINDS, "one of " + ", ".join(KINDS)),
        ("norm.family", norm.family, norm.family in FAMILIES, "one of " + ", ".join(FAMILIES)),
        (
            "norm.bias",
            norm.bias,
            kind == "pure" or norm.family != "rms" or not norm.bias,
            f"false where model.kind is {kind}, whose RMSNorm has none",
        ),
        ("norm.eps", norm.eps, 0 <= norm.eps < math.inf, "zero or more"),
        ("norm.new_weight", norm.new_weight, 0 < norm.new_weight <= 1, "above 0 and at most 1"),
        (
            "norm.channel",
            norm.channel,
            norm.channel.isidentifier() and norm.channel not in _NOT_A_CHANNEL,
            "one axis name, such as C",
        ),
        ("norm.derivative", norm.derivative, norm.derivative in DERIVATIVES, "one of " + ", ".join(DERIVATIVES)),
        ("train.epochs", train.epochs, 1 <= train.epochs <= 10_000, "between 1 and 10000"),
        ("train.batch_size", train.batch_size, train.batch_size >= 1, "at least 1"),
        ("train.learning_rate", train.learning_rate, 0 < train.learning_rate < math.inf, "above zero and finite"),
        ("train.weight_decay", train.weight_decay, 0 <= train.weight_decay < math.inf, "zero or more"),
    ]
    for key, value, holds, allowed in rules:
        if not holds:
            raise UserError(f"{source}: {key} is {shown(value)}; it must be {allowed}")
    _check_devices(config, source)


def _check_devices(config: Config, source: str) -> None:
    """The number of devices changes how fast a run is, not what it computes: the norm must see to that."""
    norm, devices, size = config.norm, config.devices, config.train.batch_size
    if size % devices:
        raise UserError(
            f"{source}: train.batch_size is {size}, which {devices} devices do not divide; "
            f"make it a multiple, such as {-(-size // devices) * devices}"
        )
    some, every = norm.pools_examples
    if norm.is_synchronised and not every:
        raise UserError(
            f"{source}: norm.axis_names {norm.axis_names!r} pools over devices ({DEVICE_AXIS}) but not over all "
            f"examples of one; add the first name of norm.layout {norm.layout!r}, or leave {DEVICE_AXIS!r} out"
        )
    if devices > 1 and not norm.is_synchronised and (some or norm.keeps_statistics):
        raise UserError(
            f"{source}: devices is {devices}, but norm.axis_names {norm.axis_names!r} pools on each of them apart; "
            f"add {DEVICE_AXIS!r}, as the preset digits-sync does"
        )


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, as JSON has them."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def to_toml(config: Config) -> str:
    """The config as a TOML file that `load` reads back to an equal one."""
    tree = to_dict(config)
    lines = [f"{name} = {_toml_value(value)}" for name, value in tree.items() if not isinstance(value, dict)]
    for table, values in tree.items():
        if isinstance(values, dict):
            lines += ["", f"[{table}]"] + [f"{name} = {_toml_value(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    """A scalar or list in TOML, whose strings, numbers and lists are JSON's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(one: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """Keys in which two configs differ, each with both values."""
    found = []
    for key in all_keys():
        a: Any = one
        b: Any = other
        for part in key.split("."):
            a, b = getattr(a, part), getattr(b, part)
        if a != b:
            found.append((key, a, b))
    return found


def _dot(table: str, name: str) -> str:
    return f"{table}.{name}" if table else name
