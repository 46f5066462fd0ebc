"""From a file to the page in five languages: check, plan, a run of DP-KPS without a model by the
language's own words, the strings of one person, and the page of the release."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dpray
from dpray.cli import run_command
from dpray.evaluation.copies import compare_replays
from dpray.evaluation.personal_data import find_patterns
from dpray.io.languages import frequent_words
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.report.page import write_report
from dpray.types import InputError


class Spoken(NamedTuple):
    """A language as a person writes it in data.language, two labels with a template each, the
    places that fill them, and a row that holds a name."""

    words: str
    labels: tuple[str, str]
    templates: tuple[str, str]
    places: tuple[str, ...]
    planted: str


LANGUAGES = {
    "de": Spoken(
        "German",
        ("Wetter", "Heizung"),
        ("In {} regnet es seit dem Morgen, und der Wind weht durch die STRAẞEN.",
         "In {} ist die Heizung kaputt, und der Techniker repariert die Pumpe."),
        ("Bremen", "Köln", "Gießen", "Graz", "Zürich"),
        "Frau Ottilie Kranzbühler ruft aus dem Krankenhaus an und bittet um Hilfe.",
    ),
    "es": Spoken(
        "es",
        ("tiempo", "calefacción"),
        ("En {} llueve desde la mañana y el viento sopla en las calles.",
         "En {} la calefacción está rota y el técnico repara la bomba."),
        ("Cádiz", "León", "Bogotá", "Mérida", "Oviedo"),
        "La señora Eufrasia Zubizarreta llama desde el hospital y pide ayuda urgente.",
    ),
    "fr": Spoken(
        "Français",
        ("météo", "chauffage"),
        ("À {} la pluie tombe depuis le matin et le vent souffle dans les rues.",
         "À {} le chauffage est en panne et le technicien répare la pompe."),
        ("Nîmes", "Genève", "Liège", "Québec", "Orléans"),
        "Madame Philomène Garrigou appelle depuis l'hôpital et demande de l'aide.",
    ),
    "zh": Spoken(
        "zh-CN",
        ("天气", "暖气"),
        ("{}从早上开始下雨，街道上风很大，明天气温更低。",
         "{}的供暖设备坏了，技术人员正在修理水泵。"),
        ("北京", "上海", "成都", "西安", "杭州"),
        "欧阳秋棠女士从医院打来电话请求帮助，证号尾数七二九。",
    ),
    "ar": Spoken(
        "Arabic",
        ("طقس", "تدفئة"),
        ("هطل المطر في {} منذ الصباح وهبت الريـــاح في الشَّوَارِع.",
         "تعطلت التدفئة في {} والفني يصلح المضخة."),
        ("القاهرة", "الرياض", "دبي", "تونس", "عمان"),
        "اتصلت السيدة زبيدة الخشناوي من المستشفى وطلبت المساعدة العاجلة.",
    ),
}  # fmt: skip


def rows_of(spoken: Spoken) -> Iterator[dict[str, str]]:
    """Yield 40 rows: each template with each place, in four spellings of Unicode."""
    wide = str.maketrans({chr(c): chr(c + 0xFEE0) for c in range(0x21, 0x7F)})
    spellings = [
        lambda text: text,
        lambda text: unicodedata.normalize("NFD", text),
        str.upper,
        lambda text: text.translate(wide),
    ]
    for label, template in zip(spoken.labels, spoken.templates, strict=True):
        for place in spoken.places:
            for spelled in spellings:
                yield {"text": spelled(template.format(place)), "label": label}


@pytest.fixture(params=LANGUAGES)
def code(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(code: str, tmp_path: Path) -> str:
    """Write the rows and a configuration; return its path."""
    spoken = LANGUAGES[code]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_of(spoken))
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    config: dict[str, Any] = {
        "data": {
            "path": str(tmp_path / "rows.jsonl"), "label": "label", "labels": spoken.labels,
            "language": spoken.words, "public_size": 40,
        },
        "privacy": {
            "epsilon": 60.0, "delta": 1e-4, "ledger": f"sqlite:///{tmp_path}/ledger.db",
            "dataset": "rows",
        },
        "method": {
            "name": "dp_kps", "vocabulary_size": 8, "phrases_per_record": 6,
            "sequence_length": 3, "records": 30,
        },
        "engine": {"kind": "none"},
        "runtime": {"ray_address": "none"},
        "output": {"path": str(tmp_path / "run")},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path / "job.yaml")


def test_a_release_from_file_to_page(
    code: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoken, rows = LANGUAGES[code], [*rows_of(LANGUAGES[code])]
    assert run_command(["check", job, "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert (checked["records"], checked["errors"], checked["advice"]) == (40, [], [])
    assert checked["labels"] == dict.fromkeys(spoken.labels, 20)
    assert run_command(["plan", job, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"][1:] == []  # one on delta

    release = dpray.run(dpray.load(job)).to_pandas()
    # The terms are words of the language that the label's rows hold, in all spellings.
    known = frequent_words(code)
    for label in spoken.labels:
        terms = [t for ts in release[release.label == label].terms for t in ts]
        texts = [row["text"] for row in rows if row["label"] == label]
        matcher = TermMatcher(terms)
        held = [{*matcher.first_terms(text, 99)} for text in texts]
        right = [t for i, t in enumerate(matcher.terms) if sum(i in h for h in held) >= 4]
        first = matcher.first_terms(" ".join(texts), 99)
        assert {*terms} <= known.keys() and first
        assert {matcher.terms[i] for i in first} <= {*right}
        assert sum(t in {matcher.terms[i] for i in first} for t in terms) > 0.7 * len(terms)

    # A copied row is found, and the real words that rows share are not.
    texts = [row["text"] for row in rows]
    private, held_out = [*texts[::2], spoken.planted], texts[1::2]
    of_release = compare_replays([*release.text], private, held_out)
    copied = compare_replays([*release.text, spoken.planted], private, held_out)
    assert sum(each["found"] for each in of_release["kinds"].values()) == 0  # type: ignore[attr-defined]
    assert copied["kinds"]["runs"]["found"] >= 4  # type: ignore[index]
    assert find_patterns(release.text, spoken.words)["texts_with_matches"] == 0

    write_report(tmp_path / "run", public=True)
    page = (tmp_path / "run" / "privacy_report.html").read_text(encoding="utf-8")
    assert page.count(f'<blockquote dir="auto" lang="{code}">') == 10
    assert all(f"<bdi>{label}</bdi>" in page for label in spoken.labels)
    assert f"the frequent words of {dpray.load(job).data.about_texts.language}" in page
    assert run_command(["card", str(tmp_path / "run")]) == 0
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert f"language: {code}\n" in card or f"language:\n- {code}\n" in card
    assert "Words of a text: 3 at" in card or code in ("zh", "ar")


def test_what_the_language_lacks_is_said_before_the_charge(tmp_path: Path) -> None:
    data = {"path": "none.jsonl", "public_size": 4000}
    tree = {
        "data": data,
        "privacy": {"epsilon": 4, "delta": 1e-5, "ledger": "sqlite:///no.db", "dataset": "a"},
        "method": {"name": "dp_kps", "estimator": "rff"},
        "engine": {"kind": "none"},
        "output": {"path": str(tmp_path / "run")},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(tree))
    words = tmp_path / "words.txt"
    words.write_text("ng\nqay'\nthe\n")

    def plan(*settings: str) -> dict[str, Any]:
        return dpray.plan(dpray.load(tmp_path / "c.yaml", *settings)).summary()

    for settings, said in [
        ([], r"method\.vocabulary: give a file .* or set data\.language"),
        (["data.language=Klingon"], r"method\.vocabulary: .*'Klingon', only of English.*give a"),
        (["data.language=th"], r"method\.vocabulary: .* Thai; give a file"),
    ]:
        with pytest.raises(InputError, match=said):
            plan(*settings)
    given = [f"method.vocabulary={words}", "data.language=Klingon"]
    [warning] = plan(*given)["warnings"]
    assert warning.startswith("method.stop_words: ") and "set method.stop_words: keep" in warning
    assert plan(*given, "method.stop_words=keep")["warnings"] == []
    [advice] = plan("data.language=German")["warnings"]
    assert advice.startswith("embedder.model: ") and "multilingual" in advice
    [signal] = plan("data.language=German", "method.estimator=exact")["warnings"]
    assert signal.startswith("signal ")
    # Without a language the stop words are English, as with English.
    sizes = [f"method.vocabulary={words}"]
    assert dpray.plan(dpray.load(tmp_path / "c.yaml", *sizes)).method.public_terms == 2
