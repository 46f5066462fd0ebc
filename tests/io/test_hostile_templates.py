"""Templates that came from elsewhere: no code runs, no other file is read, a rendering ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpray.cli import run_command
from dpray.config.config import parse_config
from dpray.io.formats import Piece
from dpray.io.sandbox import SecurityError, TooMuch, rendered
from dpray.io.template_file import TemplateFile, faults_named
from dpray.methods.aug_pe.prompts import load_variation_prompts
from dpray.methods.private_prediction.prompts import load_template
from dpray.types import InputError
from dpray.workers.rows import read_records

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ text.join.__self__ }}",
    "{{ (text|json).__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__}'.format(text) }}",
    "{{ '{x.__class__}'.format_map({'x': text}) }}",
    "{{ [text]|map(attribute='__class__')|join }}",
    "{% for x in [text] %}{{ loop.__class__ }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% macro f() %}{{ f.__globals__ }}{% endmacro %}{{ f() }}",
]

TOO_MUCH = [
    "{{ 'a' * 10**10 }}",
    "{{ ['a'] * 10**10 }}",
    "{{ 10**10**10 }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'a'|indent(10**10) }}",
    "{{ 1.5|round(10**10, 'ceil') }}",
    "{{ [1, [2]]|json(10**9) }}",
    "{{ range(10**9) }}",
    "{{ lipsum(10**9) }}",
    "{% set a = 'ab' * 10**6 %}{{ a|replace('a', a) }}",
    "{% set a = 'ab' * 10**6 %}{{ a.replace('a', a) }}",
    "{% set a = 'ab' * 10**6 %}{{ range(100000)|join(a) }}",
    "{% set a = 'ab' * 10**6 %}{{ a.join(range(100000)) }}",
    "{% set a = 'ab' * 10**6 %}{% for i in range(10**5) %}{{ a }}{% endfor %}",
    "{% set a = text %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
    "{% set a = text %}" + "{% set a = a + a %}" * 60 + "{{ a }}",
    "{% set a = 3 %}" + "{% set a = a * a %}" * 60 + "{{ a }}",
    "{% set a = [text] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "{% set a %}{{ text }}{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "{% for a in text %}" * 30 + "{% endfor %}" * 30,
    "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
    "{{ text }}" * 20_000,
    "{% set a = 'x' * 9999990 %}" * 3_000,
    "{{ [" + ", ".join(["'x' * 9999990"] * 3_000) + "]|length }}",
    "{% set a = 'x' * 9999990 %}" + "{% set b = a|upper %}" * 4_000,
    "{% set a = '1' * 9999990 %}{{ a|int(0, 2) // (a[:5000000]|int(0, 2)) > 1 }}",
]


def own(tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"user": "Like {{ text }}:", "placeholder": "a text"} | keys))
    return str(path)


@pytest.mark.parametrize("part", ["user", "prefix", "placeholder"])
@pytest.mark.parametrize("source", ESCAPES)
def test_no_code_runs(tmp_path: Path, source: str, part: str) -> None:
    with pytest.raises(InputError, match=r"^method\.template: .*own\.yaml: ") as refused:
        load_template(own(tmp_path, **{part: source}))
    assert "\n" not in str(refused.value) and "object at 0x" not in str(refused.value)


@pytest.mark.parametrize("part", ["private", "output"])
@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ x['__class__'] }}"])
def test_what_is_not_rendered_beforehand_is_looked_at(
    tmp_path: Path, source: str, part: str
) -> None:
    with pytest.raises(InputError, match="is unsafe"):
        load_template(own(tmp_path, **{part: source}))


@pytest.mark.parametrize("source", TOO_MUCH, ids=lambda source: source[:60])
def test_what_never_ends_is_refused_at_once(tmp_path: Path, source: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=r"^method\.template: .*own\.yaml: ") as refused:
        load_template(own(tmp_path, prefix=source))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert time.monotonic() - began < 60


def test_a_text_computed_in_many_steps_stops_at_the_deadline() -> None:
    with pytest.raises(TooMuch, match="takes too long"):
        rendered("{{ text|upper }}" * 4_000, {"text": "x"}, seconds=0.0)


def test_loops_within_loops_stop_at_the_deadline() -> None:
    loops = "{% for a in range(100000) %}" * 5 + "{% endfor %}" * 5
    with pytest.raises(TooMuch, match="takes too long"):
        rendered(loops, {}, seconds=0.2)
    within = "{% set a = range(100000)|list %}{{ a|reject('in', a)|list }}"
    with pytest.raises(TooMuch, match="takes too long"):
        rendered(within, {}, seconds=0.2)
    chosen = (
        "{% for a in range(100000) %}{% for b in range(100000) if b > b %}" + "{% endfor %}" * 2
    )
    with pytest.raises(TooMuch, match="takes too long"):
        rendered(chosen, {}, seconds=0.2)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ text.split(';')[1]|trim|upper }}", "B"),
        ("{{ text.replace('a', 'xy') ~ ': ' + label }}", "xy; b: News"),
        ("{{ rows|map(attribute='n')|join(', ') }}", "1, 2"),
        ("{% for r in rows if r.n > 1 %}{{ loop.index }}/{{ loop.length }}{% endfor %}", "1/1"),
        ("{% set n = 3 * 4 ** 2 %}{{ '-' * 3 }}{{ n % 5 }}", "---3"),
        ("{{ rows|json(indent=1)|length }}{{ rows[0]._id }}", "48x"),
        ("{{ range(3)|list }}{{ ('a', 'b')|join }}", "[0, 1, 2]ab"),
        ("{% for k, v in rows[0].items() %}{{ k }}={{ v }},{% endfor %}", "n=1,_id=x,"),
    ],
)
def test_the_language_that_templates_have(source: str, text: str) -> None:
    rows = [{"n": 1, "_id": "x"}, {"n": 2}]
    assert rendered(source, {"text": "a; b", "label": "News", "rows": rows}) == text


def test_plan_refuses_and_run_charges_nothing(
    tmp_path: Path, settings: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "ran"
    code = f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings(method__template=own(tmp_path, prefix=code))))
    for command in ("plan", "run"):
        assert run_command([command, str(config)]) == 2
        err = capfd.readouterr().err
        assert err.startswith("dpray: method.template: ") and err.count("\n") == 1
    assert not marker.exists() and not (tmp_path / "ledger.db").exists()


def test_a_private_row_is_in_no_error(tmp_path: Path, settings: Callable[..., Any]) -> None:
    """A template may grow its values from the row that it is given."""
    reaching = "{% if text != 'a text' %}{{ ''[text] }}{% endif %}"
    template = load_template(own(tmp_path, user=reaching))
    with pytest.raises(InputError) as refused:
        template.private_prompt("__class__ Marlowe", "a")
    assert "Marlowe" not in str(refused.value) and refused.value.__suppress_context__
    data = parse_config(settings()).data
    for source in ("{{ ''[text] }}", "{{ text * n }}", "{{ 1 // (n - 1000000000) }}"):
        template = load_template(own(tmp_path, private=source))
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"text": "__class__", "n": 1000000000, "label": "a"}\n')
        with pytest.raises(InputError, match=r"^rows\.jsonl, row 1: ") as refused:
            list(read_records(Piece(str(rows)), data, template.text_of))
        assert "__class__" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../secret.txt", "link.txt", "a\0b", "lists", ""]
)
def test_files_outside_the_templates_folder_are_not_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "templates"
    (folder / "lists").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("SECRET\n")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "words.txt").write_text("one\n")
    with pytest.raises(InputError, match=r"styles: ") as refused:
        load_variation_prompts(own_variation(folder, styles={"file": name}))
    assert "SECRET" not in str(refused.value)
    within = own_variation(folder, styles={"file": "lists/../words.txt"})
    assert load_variation_prompts(within).styles == ("one",)


def own_variation(folder: Path, **keys: Any) -> str:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"random": "R", "paraphrase": "P {{ text }}"} | keys))
    return str(path)


def test_a_template_that_is_a_folder_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^method\.template: no file "):
        load_template(str(tmp_path))
    with pytest.raises(InputError, match=r"^method\.template: .*more than 4000000 bytes"):
        load_template("/dev/zero")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "user: " + "{a: " * 20_000,
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "a: &a {x: 1}\n"
        + "".join(
            f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "user: &u [*u]",
        "user: !!python/object/apply:os.system ['true']",
    ],
    ids=["brackets", "braces", "aliases", "merges", "cycle", "object"],
)
def test_yaml_that_grows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refused, faults_named(str(path)):
        TemplateFile.read(str(path), {}, {"user"})
    assert "\n" not in str(refused.value)


def test_a_secret_word_of_the_sandbox_is_a_security_error() -> None:
    with pytest.raises(SecurityError):
        rendered("{{ ''['__cla' ~ 'ss__'] }}", {})
