import dataclasses

import pytest

from normjax.lab import config as configs
from normjax.lab.errors import UserError

FAMILY_OF = {
    "digits": "batch",
    "digits-group": "group",
    "digits-layer": "layer",
    "digits-instance": "instance",
    "digits-rms": "rms",
    "digits-sync": "batch",
    "digits-none": "none",
}


def test_there_is_a_preset_for_batch_synchronised_batch_group_layer_instance_rms_and_no_norm():
    assert {name: configs.load(name).norm.family for name in configs.presets()} == FAMILY_OF


def test_presets_differ_in_nothing_but_the_norm():
    batch = configs.load("digits")
    for name in configs.presets():
        assert dataclasses.replace(configs.load(name), norm=batch.norm) == batch


@pytest.mark.parametrize("name", FAMILY_OF)
def test_a_resolved_config_reads_back_as_the_same_config(name, tmp_path):
    config = configs.load(name, {"norm.eps": "1e-30", "model.features": "3 5,7", "norm.scale": "false", "seed": "7"})
    path = tmp_path / "config.toml"
    path.write_text(configs.to_toml(config), encoding="utf-8")
    assert configs.load(str(path)) == config
    assert configs.resolve(configs.to_dict(config), "json", {}) == config


OTHER_VALUES = {
    "seed": ("3", 3),
    "devices": ("2", 2),
    "data.held_out": ("0.5", 0.5),
    "model.features": ("4,8", (4, 8)),
    "model.kind": ("nnx", "nnx"),
    "norm.family": ("rms", "rms"),
    "norm.layout": ("B Y X Z", "B Y X Z"),
    "norm.axis_names": ("Y X", "Y X"),
    "norm.channel": ("Z", "Z"),
    "norm.scale": ("False", False),
    "norm.bias": ("false", False),
    "norm.eps": ("0", 0.0),
    "norm.new_weight": ("1", 1.0),
    "norm.unbiased": ("true", True),
    "norm.debias": ("true", True),
    "norm.derivative": ("jvp", "jvp"),
    "train.epochs": ("1", 1),
    "train.batch_size": ("2", 2),
    "train.learning_rate": ("1", 1.0),
    "train.weight_decay": ("0", 0.0),
}


def test_the_table_of_other_values_names_every_key():
    assert set(OTHER_VALUES) == set(configs.all_keys())


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_every_key_can_be_overridden(key):
    text, value = OTHER_VALUES[key]
    preset = "digits-sync" if key == "devices" else "digits"
    plain, changed = configs.load(preset), configs.load(preset, {key: text})
    assert (key, value) in [(name, here) for name, here, _ in configs.differences(changed, plain)]


@pytest.mark.parametrize("family", sorted(set(FAMILY_OF.values()) - {"none"}))
@pytest.mark.parametrize("preset", ["digits", "digits-group"])
def test_a_family_given_on_the_command_line_brings_its_own_layout_and_axes(preset, family):
    name = "digits" if family == "batch" else f"digits-{family}"
    assert configs.load(preset, {"norm.family": family}) == configs.load(name)


def test_layout_and_axes_given_beside_a_family_stay():
    norm = configs.load("digits", {"norm.family": "group", "norm.layout": "N H W C=(G=2 K)"}).norm
    assert (norm.layout, norm.axis_names) == ("N H W C=(G=2 K)", "H W K")


POOLS_SOME_AND_ALL_EXAMPLES = {
    ("N H W C", "N H W data"): (True, True),
    ("N H W C", "H W"): (False, False),
    ("... C", "... data"): (True, True),
    ("... C", "C"): (False, False),
    ("N=(B n=4) H W C", "N H"): (True, True),
    ("N=(B n=4) H W C", "B n data"): (True, True),
    ("N=(B n=4) H W C", "n H W"): (True, False),
    ("(B n=4) H W C", "n B"): (True, True),
    ("(B n=4) H W C", "B C"): (True, False),
    ("(B n=4) H W C", "H"): (False, False),
}


@pytest.mark.parametrize(("layout", "axis_names"), POOLS_SOME_AND_ALL_EXAMPLES)
def test_a_norm_knows_whether_it_pools_some_examples_and_all(layout, axis_names):
    norm = configs.NormConfig(layout=layout, axis_names=axis_names)
    assert norm.pools_examples == POOLS_SOME_AND_ALL_EXAMPLES[layout, axis_names]


def test_a_name_of_the_layout_is_no_name_for_devices():
    assert configs.NormConfig(axis_names="N data").is_synchronised
    assert not configs.NormConfig(layout="data H W C", axis_names="data H W").is_synchronised


BAD_FILES = {
    "seed = 0.5": "seed must be a whole number, not 0.5",
    "seed = true": "seed must be a whole number, not true",
    "seed = 2015-02-11": "seed must be a whole number, not 2015-02-11",
    "seed = [[1], true]": "seed must be a whole number, not [[...], true]",
    "seed = [{a = 1}]": "seed must be a whole number, not [{...}]",
    "norm = 3": "norm must be a table, [norm], not 3",
    "sead = 0": "unknown key sead; the keys of the top level are seed",
    "[norms]\nfamily = 'batch'": "unknown table [norms]; the tables are data, model, norm, train",
    "[norm]\naxes = 'N'": "unknown key norm.axes; the keys of [norm] are family, layout, axis_names, channel",
    "[norm]\nfamily = 'batsch'": "norm.family is 'batsch'; it must be one of batch, layer, instance, group, rms, none",
    "[norm]\nfamily = ['batch']": "norm.family must be text, not ['batch']",
    "[norm]\nbias = 1": "norm.bias must be true or false, not 1",
    "[norm]\neps = '1e-5'": "norm.eps must be a number, not '1e-5'",
    "[norm]\neps = nan": "norm.eps is nan; it must be zero or more",
    "[norm]\nnew_weight = 0": "norm.new_weight is 0.0; it must be above 0 and at most 1",
    "[norm]\nchannel = 'dtype'": "norm.channel is 'dtype'; it must be one axis name, such as C",
    "[norm]\nderivative = 'vpj'": "norm.derivative is 'vpj'; it must be one of vjp, jvp, autodiff",
    "[model]\nfeatures = 4": "model.features must be whole numbers (16,32 on the command line, [16, 32] in a file)",
    "[model]\nfeatures = [4, 8.0]": "model.features must be whole numbers",
    "[model]\nfeatures = []": "model.features is []; it must be 1 to 8 channel counts",
    "[model]\nkind = 'torch'": "model.kind is 'torch'; it must be one of pure, linen, nnx",
    "[train]\nepochs = 0": "train.epochs is 0; it must be between 1 and 10000",
    "[train]\nbatch_size = -1": "train.batch_size is -1; it must be at least 1",
    "[train]\nlearning_rate = inf": "train.learning_rate is inf; it must be above zero",
    "[data]\nheld_out = 1": "data.held_out is 1.0; it must be between 0.01 and 0.9",
    "[train\nepochs = 1": "is not TOML: ",
    "seed = 1\nseed = 2": "is not TOML: ",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_a_file_that_does_not_fit_is_refused_in_one_line_that_says_what_and_how(content, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        configs.load(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert BAD_FILES[content] in str(caught.value)
    assert "\n" not in str(caught.value)


LONG = "1" * 5000
TOO_LONG = {
    "decimal": (f"seed = {LONG}", "holds a number too long to read; write it with fewer digits"),
    "hexadecimal": (f"seed = 0x{LONG}", "seed is a number of about 6020 digits; it must be between 0 and 2147483647"),
    "learning rate": (f"[train]\nlearning_rate = {LONG[:400]}", "train.learning_rate is inf; it must be above zero"),
    "weight decay": (f"[train]\nweight_decay = -{LONG[:400]}", "train.weight_decay is -inf; it must be zero or more"),
    "text": (f"[norm]\nfamily = '{LONG}'", f"norm.family is '{LONG[:37]} ... {LONG[:37]}'; it must be one of batch, "),
    "features": (f"[model]\nfeatures = [{'1, ' * 5000}]", "model.features is [1, 1, 1, "),
    "deep list": (f"seed = {'[' * 100_000}{']' * 100_000}", "nests lists or tables too deep to read; no key needs a"),
    "deep table": (f"seed = {'{a = ' * 100_000}1{'}' * 100_000}", "nests lists or tables too deep to read; no key"),
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_value_too_long_to_read_or_to_show_is_refused_in_a_short_line(case, tmp_path):
    content, words = TOO_LONG[case]
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        configs.load(str(path))
    said = str(caught.value).removeprefix(f"{path}: ")
    assert said.startswith(words)
    assert len(said) < 200


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"seed = '\xff'")
    with pytest.raises(UserError, match="is not TOML"):
        configs.load(str(path))


BAD_OVERRIDES = {
    ("norm.axes", "N"): "--norm.axes: unknown key; the keys are seed, devices, data.held_out",
    ("seed", "1.5"): "--seed: expected a whole number, not '1.5'",
    ("seed", "-1"): "seed is -1; it must be between 0 and 2147483647",
    ("norm.eps", "tiny"): "--norm.eps: expected a number, not 'tiny'",
    ("norm.bias", "1"): "--norm.bias: expected true or false, not '1'",
    ("model.features", "16,x"): "--model.features: expected whole numbers (16,32 on the command line",
    ("model.features", ""): "model.features is []",
    ("seed", LONG): f"--seed: expected a whole number, not '{LONG[:37]} ... {LONG[:37]}'",
    ("seed", LONG[:401]): "seed is a number of about 400 digits; it must be between 0 and",
    ("train.learning_rate", LONG[:400]): "train.learning_rate is inf; it must be above zero and finite",
}


@pytest.mark.parametrize(("key", "text"), BAD_OVERRIDES, ids=[f"{key}-{text:.12}" for key, text in BAD_OVERRIDES])
def test_an_override_that_does_not_fit_is_refused(key, text):
    with pytest.raises(UserError) as caught:
        configs.load("digits", {key: text})
    assert BAD_OVERRIDES[key, text] in str(caught.value)
