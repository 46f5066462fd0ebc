"""Templates, also those that came from elsewhere: nothing runs, and no text makes one fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dpray.cli import run_command
from dpray.io.template_file import About, Conditional, Template, TextKey, read_template
from dpray.methods.aug_pe import prompts as aug_pe
from dpray.methods.dp_kps import prompts as dp_kps
from dpray.methods.private_prediction import prompts as private_prediction
from dpray.types import InputError

KEYS = {
    "user": TextKey(("text", "label", "terms"), needed=("text",)),
    "prefix": TextKey(("label", "terms")),
}


def read(path: Path, content: str) -> Template:
    path.write_text(content)
    return read_template(str(path), "dpray.methods.dp_kps", KEYS, "user")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{text.__class__}", "has no placeholder {text.__class__}; there are {text}, {label}"),
        ("{text[0]}", "has no placeholder {text[0]}"),
        ("{text!r}", "may have only names in braces"),
        ("{text:>10000000000}", "may have only names in braces"),
        ("{text:{label}}", "may have only names in braces"),
        ("{0}", "has no placeholder {0}"),
        ("{}", "has no placeholder {}"),
        ("{ text }", "has no placeholder {text}"),
        ("{" + "x" * 900 + "}", "has no placeholder {" + "x" * 40 + "}"),
        ("{% if label %}{text}{% endif %}", "has no placeholder {% if label %}"),
        ("{{text}}", "has no {text}"),
        ("{text", "may have only names in braces"),
        ("text}", "may have only names in braces"),
        ("{text} { {label}", "may have only names in braces"),
        ("{{{text}", ""),
        ("{text}}}", ""),
    ],
)
def test_only_placeholders_stand_in_braces(tmp_path: Path, text: str, said: str) -> None:
    content = yaml.safe_dump({"user": text}, width=10_000)
    if not said:
        assert read(tmp_path / "own.yaml", content).render("user", text="<>") in ("{<>", "<>}")
        return
    with pytest.raises(InputError) as refused:
        read(tmp_path / "own.yaml", content)
    assert str(refused.value).startswith(f"method.template: {tmp_path / 'own.yaml'}: `user` {said}")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


SHOWN = {
    "{a}": "{if: label, then: '{text}', else: '{text}.'}",
    "{text}{a}": "{if: label, then: x}",
    "{label}{a}": "{if: text, then: '{text}'}",
}
LEFT_OUT = {
    "{a}": "{if: label, then: '{text}'}",
    "{terms}{a}": "{if: terms, then: '{text}', else: nothing}",
    "{label}{a}": "{if: label, then: nothing, else: '{text}'}",
}


def test_a_text_is_shown_whatever_the_other_values_are(tmp_path: Path) -> None:
    for user, part in SHOWN.items():
        read(tmp_path / "own.yaml", f"user: '{user}'\nparts: {{a: {part}}}")
    for user, part in LEFT_OUT.items():
        with pytest.raises(InputError, match=r"`user` (does not always show|has no) \{text\}$"):
            read(tmp_path / "own.yaml", f"user: '{user}'\nparts: {{a: {part}}}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("user: '{text}'\nprefix: '{text}'\n", "`prefix` has no placeholder {text}"),
        ("prefix: x", "`user` Field required"),
        ("user: '{text}'\nusers: x", "`users` is no key of a template (did you mean 'user'?)"),
        ("user: 5", "`user` Input should be a valid string"),
        ("user: '{text}'\nstop: '###'", "`stop` Input should be a valid tuple"),
        ("user: '{text}'\nstop: []", "`stop` Tuple should have at least 1 item"),
        ("user: '{text}'\nstop:\n- a\n- 5", "`stop.1` Input should be a valid string"),
        ("user: '{text}'\nstop: ['']", "`stop.0` String should have at least 1 character"),
        ("user: '{text}'\nlabels: {1: 2}", "`labels.1` Input should be a valid string"),
        ("user: '{text}'\nparts: {a: {then: x}}", "`parts.a.if` Field required"),
        ("user: '{text}'\nparts: {label: {if: text, then: x}}", "`parts.label` is the name"),
        ("user: '{text}{a}'\nparts: {a: {if: x, then: y}}", "`parts.a.if` has no placeholder {x}"),
        (
            "user: '{text}{a}'\nparts:\n  a: {if: label, then: '{a}'}",
            "`parts.a.then` has no placeholder {a}",
        ),
        (
            "user: '{text}{a}'\nprefix: '{a}'\nparts:\n  a:\n    if: label\n    then: '{text}'",
            "`parts.a.then` has no placeholder {text}; there are {label}, {terms}",
        ),
        ("user: [", "line 1: expected the node content"),
        ("just a text", "not a YAML file"),
        ("user: &u [*u]", "line 1: write the value itself"),
        ("user: !!python/name:os.system", "line 1: could not determine a constructor"),
    ],
)
def test_a_wrong_template_says_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(InputError, match=r"^method\.template: .*own\.yaml: ") as wrong:
        read(tmp_path / "own.yaml", content)
    assert said in str(wrong.value) and "\n" not in str(wrong.value)


@pytest.mark.parametrize("name", ["nowhere.yaml", "", ".", "/", "a\0b"])
def test_no_such_file(name: str) -> None:
    with pytest.raises(InputError, match=r"no file .* and no packaged template \(texts\)"):
        read_template(name, "dpray.methods.dp_kps", KEYS)


TEMPLATE = Template(
    {"user": "{{{text}}} {of}{end}"},
    {
        "of": Conditional(**{"if": "label", "then": "of {label} {{text}}"}),
        "end": Conditional(**{"if": "terms", "then": ": {terms}", "else": "."}),
    },
    {"a": "the first"},
)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"text": "x", "label": "", "terms": ""}, "{x} ."),
        ({"text": "x", "label": "a", "terms": "b, c"}, "{x} of the first {text}: b, c"),
        ({"text": "{label}", "label": "{text}", "terms": "{{"}, "{{label}} of {text} {text}: {{"),
    ],
)
def test_parts_depend_on_whether_a_placeholder_is_empty(values: dict[str, str], text: str) -> None:
    assert TEMPLATE.render("user", **values) == text
    assert TEMPLATE.render("prefix", **values) == ""


@given(st.text(), st.text(), st.text())
def test_values_come_through_as_they_are(text: str, label: str, terms: str) -> None:
    template = Template({"user": "{text}|{label}|{terms}"})
    assert template.render("user", text=text, label=label, terms=terms) == f"{text}|{label}|{terms}"


@given(st.text("{}abtext ", max_size=30))
def test_what_is_read_can_be_rendered(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Whatever a file says, it is refused at once or never fails."""
    path = tmp_path_factory.mktemp("templates") / "own.yaml"
    parts = {"a": {"if": "label", "then": text}, "b": {"if": "terms", "then": text, "else": text}}
    try:
        template = read(path, yaml.safe_dump({"user": "{text}" + text, "parts": parts}))
    except InputError:
        return
    for label in ("", "l"):
        assert template.render("user", text="{", label=label, terms="").startswith("{")


@pytest.mark.parametrize("method", [private_prediction, aug_pe, dp_kps])
def test_each_placeholder_of_a_method_has_a_value(tmp_path: Path, method: Any) -> None:
    """Each text has all of its placeholders, straight and as the condition of a part."""
    parts = {
        f"if_{name}": {"if": name, "then": f"<{{{name}}}>"}
        for key in method.TEXTS.values()
        for name in key.placeholders
    }
    texts = {
        key: "".join(f"{{{name}}}{{if_{name}}}" for name in of_key.placeholders)
        for key, of_key in method.TEXTS.items()
    }
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(texts | {"parts": parts}))
    if method is private_prediction:
        made = private_prediction.load_template(str(own))
        for prompt in (made.private_prompt("t", "l", ["e"]), made.public_prompt("l", ["e"])):
            assert "l<l>" in prompt.user and "e<e>" in prompt.user and "l<l>" in prompt.prefix
        assert made.released("c") == "c<c>"
        return
    rng = np.random.default_rng(0)
    if method is dp_kps:
        asked = dp_kps.load_keyphrase_prompts(str(own), "d").prompt(
            ["t"], "l", rng, name_label=True
        )
        assert asked.user == "t<t>d<d>l<l>"
        return
    for kind in ("paraphrase", "fill_in_the_blanks"):
        varied = aug_pe.load_variation_prompts(str(own), kind)
        assert varied.random("l", rng).user == "l<l>"
        assert varied.variation(kind, "l", "t", 7, rng).user.startswith("t<t>l<l>7<7>")


def test_plan_refuses_and_run_charges_nothing(
    tmp_path: Path, settings: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    own, config = tmp_path / "own.yaml", tmp_path / "config.yaml"
    own.write_text("user: |-\n  Like {text}:\n  {label.__class__}\n")
    config.write_text(yaml.safe_dump(settings(method__template=str(own))))
    for command in ("check", "plan", "run"):
        assert run_command([command, str(config)]) == 2
        err = capfd.readouterr().err
        assert f"dpray: method.template: {own}: `user` has no placeholder" in err
        assert err.count("\n") == 1
    assert not (tmp_path / "ledger.db").exists()


def test_what_the_configuration_says_about_the_texts(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "user: 'Here are {things} in {language}: {label}. {text}'\n"
        "placeholder: x\n"
        "parts: {things: {if: about, then: '{about}', else: texts}}\n"
        "labels: {2: from the template}\n"
    )
    about = About("letters {of} guests", "German", {"1": "praise", "2": "complaints"})
    made = private_prediction.load_template(str(own), about=about)
    assert made.private_prompt("T", "1").user == "Here are letters {of} guests in German: praise. T"
    assert "complaints" in made.private_prompt("T", "2").user, "the configuration's words go first"
    assert str(about) == "letters {of} guests; German; 1: praise; 2: complaints"
    assert not str(About())
    bare = private_prediction.load_template(str(own))
    assert bare.private_prompt("T", "2").user == "Here are texts in : from the template. T"
    own.write_text("user: '{text}{about}'\nplaceholder: x\nparts: {about: {if: label, then: a}}\n")
    with pytest.raises(InputError, match="is the name of a placeholder"):
        private_prediction.load_template(str(own))
