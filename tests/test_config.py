from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.settings_file import read_tree
from dpray.methods.config import RunConfig, load_config, parse_config
from dpray.types import InputError

Settings = Callable[..., dict[str, Any]]
ConfigFile = Callable[..., str]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy__epsilon": float("nan")}, "privacy.epsilon: "),
        ({"privacy__epsilon": float("inf")}, "privacy.epsilon: "),
        ({"privacy__epsilon": 0}, "privacy.epsilon: "),
        ({"privacy__epsilon": 1e308}, "privacy.epsilon: at most 1e+06"),
        ({"privacy__delta": -1e-6}, "privacy.delta: "),
        ({"privacy__delta": 1.0}, "privacy.delta: "),
        ({"privacy__dataset": ""}, "privacy.dataset: "),
        ({"method__batch_size": 0}, "method.batch_size: "),
        ({"method__batchsize": 5}, "method.batchsize: there is no such key"),
        ({"method__clip": "none"}, "method.clip: "),
        ({"method__sparse_vector": {"threshold": 0.5}}, "method.sparse_vector.noise: "),
        ({"method__public_gate": 0.9}, "method.public_gate: has keys of its own"),
        ({"data__labels": []}, "data.labels: "),
        ({"data__labels": "a, b"}, "data.labels: is a list in brackets, as in data.labels=[A, B]"),
        ({"data__roles": "user"}, "data.roles: is a list in brackets, as in data.roles=[A, B]"),
        ({"data__labels": ["a", "a"]}, "data.labels: "),
        ({"data__label_proportions": {"a": 1.0}}, "data.label_proportions: "),
        ({"data__label_proportions": {"a": 0.7, "b": 0.7}}, "data.label_proportions: "),
        ({"data__max_records_per_unit": 3}, "data.max_records_per_unit: "),
        ({"data__delimiter": ";;"}, "data.delimiter: one character, or "),
        ({"data__delimiter": "\n"}, "data.delimiter: one character, or "),
        ({"data__delimiter": '"'}, "data.delimiter: is the sign of data.quote or data.escape too"),
        ({"data__quote": "''"}, "data.quote: String should have at most 1 character"),
        ({"data__encoding": "cp12525"}, "data.encoding: not an encoding of texts that Python"),
        ({"data__encoding": "rot13"}, "data.encoding: not an encoding of texts that Python"),
        ({"data__text": []}, "data.text: a column, or a list of columns"),
        ({"data__text": 7.5}, "data.text: a column, or a list of columns"),
        ({"data__text": ["a", "a"]}, "data.text: a column is given twice"),
        ({"data__empty": "drop"}, "data.empty: Input should be 'refuse' or 'skip'"),
        ({"engine__kind": "openai"}, "engine.kind: "),
        (
            {"engine__base_url": "http://sk@host/v1"},
            "engine.base_url: a name or password has no place",
        ),
        ({"engine__base_url": "localhost:8000/v1"}, "engine.base_url: no URL; it begins with http"),
        ({"engine__base_url": "api.example.org/v1"}, "engine.base_url: no URL"),
        ({"engine__base_url": "ftp://host/v1"}, "engine.base_url: no URL"),
        ({"engine__base_url": "http:/host/v1"}, "engine.base_url: no URL"),
        ({"engine__base_url": "http://"}, "engine.base_url: no URL"),
        ({"engine__base_url": "http://host:99999"}, "engine.base_url: Port out of range"),
        ({"engine__base_url": "http://host:here"}, "engine.base_url: Port could not be cast"),
        ({"engine__base_url": "http://[::1/v1"}, "engine.base_url: Invalid IPv6 URL"),
        ({"engine__base_url": "http://host/v1?a=b"}, "engine.base_url: blanks, `?` and `#`"),
        ({"engine__base_url": "http://host /v1"}, "engine.base_url: blanks"),
        (
            {"engine__base_url": "http://host/v1/chat/completions"},
            "engine.base_url: ends where the API begins",
        ),
    ],
)
def test_wrong_keys_are_named_in_one_line(
    settings: Settings, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as wrong:
        parse_config(settings(**change))
    assert str(wrong.value).startswith(message) and "\n" not in str(wrong.value)
    assert "sk@" not in str(wrong.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("method.batchsize=5", "method.batchsize: there is no such key (did you mean 'batch_size'"),
        ("method.batch-size=5", "method.batch-size: there is no such key (did you mean 'batch_si"),
        ("method.iterations=5", "method.iterations: there is no such key; it is a key of aug_pe"),
        ("method.name=aug_pe", "method.batch_size: there is no such key; it is a key of dp_sgd, "
         "private_prediction; `dpray init FILE --method aug_pe -o OTHER.yaml` writes a conf"),
        ("method.records=5", "method.records: there is no such key; it is a key of aug_pe, auto, "),
        ("method.sparse_vector.treshold=1", "method.sparse_vector.treshold: there is no such key ("
         "did you mean 'threshold'?"),
        ("data.txt=a", "data.txt: there is no such key (did you mean 'text'?)"),
        ("data.epsilon=4", "data.epsilon: there is no such key (did you mean privacy.epsilon?)"),
        ("epsilon=4", "epsilon: there is no such key (did you mean privacy.epsilon?)"),
        ("model=x", "model: there is no such key (did you mean engine.model or embed"),
        ("metod.name=x", "metod: there is no such key (did you mean 'method'?)"),
        ("engine.max_modellen=9", "engine.max_modellen: there is no such key (did you mean 'max_"),
        ("output.folder=x", "output.folder: there is no such key"),
        ("zzz=1", "zzz: there is no such key"),
        ("data.0=1", "data.0: there is no such key"),
    ],
)  # fmt: skip
def test_a_mistyped_key_is_answered_with_a_near_one(
    config_file: ConfigFile, setting: str, message: str
) -> None:
    with pytest.raises(InputError) as wrong:
        load_config(config_file(), [setting])
    assert str(wrong.value).startswith(message)


def test_a_mistyped_key_is_named_before_the_one_that_is_missing_for_it(settings: Settings) -> None:
    for section, name in (("data", "path"), ("privacy", "epsilon"), (None, "engine")):
        tree = settings()
        below = tree if section is None else tree[section]
        below[f"{name}x"] = below.pop(name)
        with pytest.raises(InputError, match=rf"{name}x: .*did you mean '{name}'\?\) \(and 1 more"):
            parse_config(tree)


def test_the_keys_of_a_chain_are_those_of_its_methods(settings: Settings) -> None:
    tree = settings()
    del tree["method"]
    first, second = {"name": "dp_kps", "vocabulary": "v.txt"}, {"name": "aug_pe"}
    for wrong, said in (
        ({"feature": 3}, r"methods\.0\.feature: .*did you mean 'features'"),
        ({"iterations": 3}, r"methods\.0\.iterations: .*; it is a key of aug_pe$"),
    ):
        with pytest.raises(InputError, match=said):
            parse_config(tree | {"methods": [first | wrong, second]})


KEYS = [
    (section, key)
    for section, field in RunConfig.model_fields.items()
    if section != "method"
    for key in field.annotation.model_fields  # type: ignore[union-attr]
]

LEAST: dict[str, Any] = {
    "data": {"path": "x.csv", "public_size": 60},
    "privacy": {"epsilon": 5, "delta": 1e-5, "dataset": "notes"},
    "method": {"name": "aug_pe"},
    "engine": {"model": "m"},
}


@given(key=st.sampled_from(KEYS), place=st.integers(0, 30), letter=st.sampled_from("xq_"))
def test_any_key_with_a_wrong_letter_is_answered(
    key: tuple[str, str], place: int, letter: str
) -> None:
    section, name = key
    typed = name[: place % len(name)] + letter + name[place % len(name) :]
    if (section, typed) not in KEYS:
        with pytest.raises(InputError) as wrong:
            parse_config(LEAST | {section: {**LEAST.get(section, {}), typed: 1}})
        assert f"{section}.{typed}: there is no such key (did you mean '" in str(wrong.value)


def test_settings_after_the_file(config_file: ConfigFile) -> None:
    after = ["privacy.epsilon=0.5", "data.labels=[x,y]", "method.clip=dclip"]
    config = load_config(config_file(), after)
    assert config.privacy.epsilon == 0.5
    assert config.data.labels == ("x", "y")
    assert config.method.clip == "dclip"


NO_NUMBERS = ["1:30", "0x10", "0o10", "012", "1_000", "true", "'4'", "'.inf'", "inf", "no", "[1]"]
TOO_LARGE = ["1e400", "-1e400", ".nan", "9" * 400]


@pytest.mark.parametrize("value", [*NO_NUMBERS, *TOO_LARGE, "~", "-.inf", "0", "-1"])
@pytest.mark.parametrize("by", ["file", "setting"])
def test_epsilon_is_a_plain_number(config_file: ConfigFile, by: str, value: str) -> None:
    method = {"name": "aug_pe", "records": 8, "iterations": 1}  # may have no noise
    path = Path(config_file(method=method, privacy__epsilon=4.25))
    after = [f"privacy.epsilon={value}"] if by == "setting" else []
    if by == "file":
        path.write_text(path.read_text().replace("4.25", value))
    with pytest.raises(InputError, match=r"^privacy\.epsilon: |digits") as wrong:
        load_config(path, after)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("value", "epsilon"), [("4", 4.0), ("0.5", 0.5), ("1e-3", 1e-3), (".inf", float("inf"))]
)
def test_epsilon_is_read(config_file: ConfigFile, value: str, epsilon: float) -> None:
    path = config_file(method={"name": "aug_pe", "records": 8})
    assert load_config(path, [f"privacy.epsilon={value}"]).privacy.epsilon == epsilon


@pytest.mark.parametrize(
    "setting",
    [
        "method.batch_size=true",
        "method.batch_size='5'",
        "method.clip_bound=.inf",
        "method.sparse_vector={threshold: true, noise: 1}",
        "data.label_proportions={a: true, b: false}",
        "runtime.gpus_per_actor=.inf",
        "privacy.delta=1e400",
        "engine.timeout=.inf",
    ],
)
def test_no_number_is_a_truth_value_a_text_or_infinite(
    config_file: ConfigFile, setting: str
) -> None:
    with pytest.raises(InputError) as wrong:
        load_config(config_file(), [setting])
    assert str(wrong.value).startswith(setting.partition("=")[0])


def test_settings_go_into_mappings_and_lists(settings: Settings, tmp_path: Path) -> None:
    path, tree = tmp_path / "config.yaml", settings(method__sparse_vector=None)
    del tree["method"]
    tree["methods"] = [{"name": "dp_kps", "vocabulary": "v.txt"}, {"name": "aug_pe", "records": 5}]
    path.write_text(yaml.safe_dump(tree))
    read = read_tree(
        path, ["methods.1.records=9", "data={label: null, unit: who}", "embedder.model=m"]
    )
    assert read["methods"] == [tree["methods"][0], {"name": "aug_pe", "records": 9}]
    assert read["data"] == tree["data"] | {"label": None, "unit": "who"}
    assert read["embedder"] == {"model": "m"}
    with pytest.raises(InputError, match=r"^methods\.2\.records: there is no entry 2"):
        read_tree(path, ["methods.2.records=9"])


@pytest.mark.parametrize("text", ["a: [1", "just words", "- a\n- b\n", "\x00"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as wrong:
        load_config(path)
    assert "\n" not in str(wrong.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing.yaml: No such file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match=r"key.sub=value"):
        load_config(tmp_path / "missing.yaml", ["epsilon"])


def test_every_key_of_the_method_has_a_default_and_a_description() -> None:
    methods = get_args(RunConfig.model_fields["method"].annotation)
    fields = {k: v for method in methods for k, v in method.model_fields.items()}
    del fields["vocabulary"]  # only the user knows which public words suit the texts
    del fields["methods"]  # which are chained is what is asked for
    assert {
        "batch_size", "private_tokens", "clip", "clip_bound", "temperature", "candidates", "k",
        "sparse_vector", "public_temperature", "max_tokens", "max_records", "template",
    } <= set(fields)  # fmt: skip
    for name, field in fields.items():
        assert name == "name" or (not field.is_required() and field.description), name


def test_proportions_are_uniform_unless_given(settings: Settings) -> None:
    assert parse_config(settings()).data.proportions == {"a": 0.5, "b": 0.5}
    given = parse_config(settings(data__label_proportions={"a": 0.9, "b": 0.1}))
    assert given.data.proportions == {"a": 0.9, "b": 0.1}
    nameless = parse_config(settings(data__label=None, data__labels=[]))
    assert nameless.data.proportions == {"": 1.0}


def test_the_api_key_is_not_shown(settings: Settings) -> None:
    tree = settings()
    tree["engine"]["api_key"] = "sk-secret"
    assert "sk-secret" not in repr(parse_config(tree))


def test_a_tab_as_a_shell_passes_it(settings: Settings) -> None:
    assert parse_config(settings(data__delimiter="\\t")).data.format.delimiter == "\t"


@pytest.mark.parametrize("written", ["\\x01", "\\u0001", "\x01", '"\\x01"'])
def test_a_control_character_may_divide_cells(
    settings: Settings, config_file: ConfigFile, written: str
) -> None:
    """A shell passes `\\x01` as it stands; YAML makes one character of it within quotes."""
    config = load_config(config_file(), [f"data.delimiter={written}"])
    assert config.data.format.delimiter == "\x01"
    assert load_config(config_file(data__delimiter="\x01")).data.format.delimiter == "\x01"
    for other in ("\\x00", "\\x0a", "\\x1", "\\ud800", "\x01\x02"):
        with pytest.raises(InputError, match=r"^data\.delimiter: one character, "):
            parse_config(settings(data__delimiter=other))
    with pytest.raises(InputError, match=r"^data\.text: holds a control character"):
        parse_config(settings(data__text="\x01"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.delimiter=||", "data.delimiter: one character, as it is typed"),
        ("data.quote=%%", "data.quote: one character, as it is typed"),
        (
            'data.labels="Heart, lungs",Skin',
            "data.labels: not a valid value; a list is in brackets",
        ),
        ("privacy.dataset=2024", "privacy.dataset: not a text; a number or null goes in quotes"),
        ("engine.model=null", "engine.model: not a text; a number or null goes in quotes"),
    ],
)
def test_a_setting_that_yaml_reads_otherwise_is_refused_with_the_remedy(
    config_file: ConfigFile, setting: str, said: str
) -> None:
    file = config_file()
    with pytest.raises(InputError) as refused:
        load_config(file, [setting])
    assert str(refused.value).startswith(said)
    _, _, pasted = str(refused.value).partition("'")
    if pasted.startswith("privacy."):
        config = load_config(file, [pasted.rstrip("'").replace("1", "2024")])
        assert config.privacy.dataset == "2024"
