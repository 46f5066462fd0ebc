"""`dpray init` writes a configuration that loads, from a header and a few answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dpray
from dpray.cli import run_command
from dpray.commands.starter import (
    dataset_name,
    in_encoding,
    read_labels,
    starter,
    starter_values,
    usual_delta,
    write_checked,
)
from dpray.engines.rates import Rates
from dpray.io.formats import FileFormat, Where
from dpray.ledger.chain import check_name
from dpray.runs.forecast import Forecast, rates_here
from dpray.workers.rows import check_first_records, to_row

NEEDED = ("--public-size", "4000", "--epsilon", "4")

NOTHING: dict[str, Any] = dict.fromkeys(
    ("text", "label", "labels", "unit", "public_size", "epsilon", "delta", "method", "vocabulary",
     "dataset", "model", "out", "turns", "about", "label_about", "language")
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def semicolons(name: str = "notes.csv", encoding: str = "cp1252") -> str:
    rows = ["Art;text", "Größe;Müller war hier", "Alter;Marlowe auch", "Größe;Marlowe ging"]
    Path(name).write_text("\n".join(rows) + "\n", encoding=encoding)
    return name


def test_a_configuration_that_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sub").mkdir()
    file = semicolons("sub/Patient notes.CSV", "utf-8")
    assert run_command(["init", file, *NEEDED, "--label", "Art", "--labels", "Größe, Alter"]) == 0
    made = folder / "sub" / "Patient-notes.yaml"
    config = dpray.load(made)
    assert config.data.path == file and config.data.delimiter == ";"
    assert config.data.encoding is None and config.data.labels == ("Größe", "Alter")
    assert (config.privacy.epsilon, config.privacy.delta) == (4.0, 1e-5)
    assert config.privacy.dataset == "Patient-notes" and config.method.name == "private_prediction"
    assert config.output.path == "out/Patient-notes"
    assert config.method.model_dump()["stop"] == ("\n\n",)
    page = made.read_text(encoding="utf-8")
    assert page.count("#") > 10 and "# label_about: {A: WORDS}" in page
    assert "dpray check" in capsys.readouterr().out


def test_tables_and_conversations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "films.csv").write_text("title,year,label\nUp,2009,a\n")
    assert run_command(["init", "films.csv", *NEEDED, "--text", "title, year"]) == 0
    config = dpray.load(folder / "films.yaml")
    assert config.data.text == ("title", "year") and config.data.turns is None
    schema = config.method.model_dump()["schema"]
    assert schema["required"] == ["title", "year"] and not schema["additionalProperties"]
    # The cells of CSV are texts, so the model may write no other value. JSON has types.
    assert schema["properties"] == {"title": {"type": "string"}, "year": {"type": "string"}}
    (folder / "typed.jsonl").write_text('{"title": "Up", "year": 2009}\n')
    assert run_command(["init", "typed.jsonl", *NEEDED, "--text", "title,year"]) == 0
    typed = dpray.load(folder / "typed.yaml").method.model_dump()["schema"]
    assert typed["properties"] == {"title": {}, "year": {}}
    assert config.method.model_dump()["stop"] == ()  # a record is one paragraph by its schema
    dpray.plan(config)
    (folder / "chats.jsonl").write_text('{"chat": [{"role": "user", "content": "Hi"}]}\n')
    assert run_command(["init", "chats.jsonl", *NEEDED, "--turns", "chat", "--look"]) == 0
    config = dpray.load(folder / "chats.yaml")
    assert config.data.turns == "chat" and config.method.model_dump()["schema"] is not None
    dpray.plan(config)
    for wrong, why in (
        (["--text", "title,yaer"], "--text: no column 'yaer'; there are: title, year, label"),
        (["--text", "title", "--turns", "year"], "--turns: give --text or --turns"),
        (["--turns", "chat"], "--turns: no column 'chat'"),
    ):
        assert run_command(["init", "films.csv", *NEEDED, *wrong, "--force"]) == 2
        assert why in capsys.readouterr().err


def test_conversations_are_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [{"from": "human", "value": "Hi"}, {"from": "Tool", "value": "1"}]
    (folder / "a.jsonl").write_text((json.dumps({"id": 1, "chat": said}) + "\n") * 2)
    pq.write_table(pa.table({"id": [1], "chat": [said]}), folder / "b.parquet")
    for file in ("a.jsonl", "b.parquet"):
        assert run_command(["init", file, *NEEDED]) == 2
        assert "init: needs --turns chat or --text; there are: id, chat" in capsys.readouterr().err
        assert run_command(["init", file, *NEEDED, "--text", "chat"]) == 2
        said = capsys.readouterr().err
        assert "--text: the column holds conversations; give --turns chat" in said
        # Without a look the usual roles are written; with it those of the rows, so that a run takes
        # every row.
        made = ["init", file, *NEEDED, "--turns", "chat", "-o", "c.yaml", "--force"]
        assert run_command(made) == 0
        assert dpray.load("c.yaml").data.roles == ("system", "user", "assistant")
        assert run_command([*made, "--look"]) == 0
        data = dpray.load("c.yaml").data
        assert data.roles == ("system", "user", "assistant", "Tool")
        assert "which are private" in Path("c.yaml").read_text()
        check_first_records(data)
        given = NOTHING | {"public_size": 9, "epsilon": 1.0}
        asked = starter_values(file, FileFormat(), given, False, lambda _, default: default or "")
        assert asked["turns"] == "chat" and asked["text"] is None


def test_a_first_part_without_bytes_has_no_header(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "parts" / "0.parquet").touch()
    pq.write_table(pa.table({"text": ["x"]}), folder / "parts" / "1.parquet")
    assert run_command(["init", "parts", *NEEDED, "--look"]) == 0
    check_first_records(dpray.load("parts.yaml").data)


def test_without_look_no_row_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The rows are not UTF-8, and no CSV: nobody notices.
    (folder / "notes.csv").write_bytes(b'text,label\n\xff\xfe"Marlowe\n')
    assert run_command(["init", "notes.csv", *NEEDED]) == 0
    assert "Marlowe" not in (folder / "notes.yaml").read_text()
    assert run_command(["init", "notes.csv", *NEEDED, "--look", "--force"]) == 2
    assert "Marlowe" not in "".join(capsys.readouterr())


def test_look_finds_labels_and_the_encoding(folder: Path) -> None:
    file = semicolons()
    assert run_command(["init", file, *NEEDED, "--label", "Art", "--look"]) == 0
    config = dpray.load("notes.yaml")
    assert config.data.labels == ("Alter", "Größe") and config.data.encoding == "cp1252"
    assert "keep those that" in (folder / "notes.yaml").read_text(encoding="utf-8").lower()
    assert "Marlowe" not in (folder / "notes.yaml").read_text(encoding="utf-8")
    # Labels keep the types that they have in the rows.
    rows = [{"text": "Marlowe", "label": label} for label in (True, 0, "0.5", 2.5)]
    (folder / "typed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_command(["init", "typed.jsonl", *NEEDED, "--label", "label", "--look"]) == 0
    assert dpray.load("typed.yaml").data.labels == (0, "0.5", 2.5, True)


def test_look_finds_the_labels_of_a_sorted_file(folder: Path) -> None:
    rows = [json.dumps({"text": "x", "label": f"l{n // 600}"}) for n in range(3000)]
    Path("notes.jsonl").write_text("\n".join(rows))
    assert run_command(["init", "notes.jsonl", "--label", "label", "--look", *NEEDED]) == 0
    assert dpray.load("notes.yaml").data.labels == tuple(f"l{n}" for n in range(5))


def test_a_folder_with_a_given_delimiter_in_windows_encoding(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "a.csv").write_bytes("Größe^text\nMarlowe^a\n".encode("cp1252"))
    assert run_command(["init", "notes", *NEEDED, "--delimiter", "^", "-o", "new.yaml"]) == 0
    data = dpray.load("new.yaml").data
    assert (data.path, data.delimiter, data.text, data.encoding) == ("notes", "^", "text", "cp1252")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --public-size, --epsilon"),
        ([*NEEDED, "--delimiter", "ab"], "--delimiter"),
        ([*NEEDED, "--label", "Art"], "needs --labels"),
        (
            [*NEEDED, "--method", "dp_kps"],
            "init: needs --vocabulary or --language; dp_kps counts public words; --language "
            "English takes its frequent words, --vocabulary FILE has one term a line\n",
        ),
        (
            [*NEEDED, "--method", "dp_kps", "--language", "Klingon"],
            "public words: no list of words is known of 'Klingon'; --language English",
        ),
        ([*NEEDED, "--text", "txet"], "--text: no column 'txet'; there are: Art, text"),
        ([*NEEDED, "--epsilon", "-1"], "privacy.epsilon: "),
        ([*NEEDED, "--dataset", "${oc.env:HOME}"], "privacy.dataset: "),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    file = semicolons()
    assert run_command(["init", file, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["notes.csv"]


@pytest.mark.parametrize("file", ["postgresql+psycopg://host/office", "a/B.SQLite3"])
def test_a_database_is_no_file(capsys: pytest.CaptureFixture[str], file: str) -> None:
    assert run_command(["init", file, *NEEDED]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "data.query='SELECT" in err and "export" in err


def test_a_column_that_looks_like_a_person_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.csv").write_text("tenant,user,text\nMarlowe,a,b\n")

    def said(*options: str) -> str:
        assert run_command(["init", "a.csv", *NEEDED, "--force", *options]) == 0
        return capsys.readouterr().out

    labels = ("--label", "user", "--labels", "a")
    assert "looks like a person (tenant, user): --unit COLUMN" in said()
    assert "looks like a person (tenant): --unit COLUMN" in said(*labels)
    assert json.loads(said("--json"))["likely_units"] == ["tenant", "user"]
    for answered in (["--unit", "tenant"], ["--no-unit"]):
        assert "like a person" not in said(*answered)
        assert "likely_units" not in json.loads(said("--json", *answered))


def test_prompts_of_dp_kps_name_the_label(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.csv").write_text("kind,text\na,b\n")
    words = ("--label", "kind", "--labels", "1", "--label-about", "1: heart")
    given = ("--method", "dp_kps", "--language", "English", *words)
    assert run_command(["init", "a.csv", *NEEDED, *given]) == 0
    config = dpray.load("a.yaml")
    assert config.method.model_dump()["label_in_prompt"] is True
    assert dict(dpray.plan(config).about.labels) == {"1": "heart"}
    unnamed = dpray.plan(dpray.load("a.yaml", "method.label_in_prompt=false")).about
    assert unnamed.labels == {} and unnamed.language == "English"
    capsys.readouterr()
    for shown, changes in ((True, []), (False, ["method.label_in_prompt=false"])):
        assert run_command(["plan", "a.yaml", *changes]) == 0
        assert ("1: heart" in capsys.readouterr().out) is shown


def test_a_file_without_a_header_shows_no_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first row would be released as the name of the column."""
    Path("bare.csv").write_text("Marlowe was here for the third time with a fever\nanother\n")
    assert run_command(["init", "bare.csv", *NEEDED]) == 2
    said = capsys.readouterr()
    assert "needs --text" in said.err and "Marlowe" not in said.err + said.out
    assert not Path("bare.yaml").exists()


def test_a_file_is_replaced_by_force_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = semicolons()
    (folder / "mine.yaml").write_text("mine")
    assert run_command(["init", file, *NEEDED, "-o", "mine.yaml"]) == 2
    assert (folder / "mine.yaml").read_text() == "mine"
    assert run_command(["init", file, *NEEDED, "-o", "mine.yaml", "--epsilon", "0", "--force"]) == 2
    assert (folder / "mine.yaml").read_text() == "mine", "a refused answer replaces nothing"
    capsys.readouterr()
    assert run_command(["init", file, *NEEDED, "-o", "mine.yaml", "--force", "--json"]) == 0
    made = {"config": "mine.yaml", "columns": ["Art", "text"]}
    assert json.loads(capsys.readouterr().out) == made
    assert dpray.load("mine.yaml").data.public_size == 4000


def test_a_person_is_asked_for_the_rest() -> None:
    replies: Iterator[str] = iter(
        ["text", "letters of guests", "Art", "", "500", "2", "aug_pe", "Größe,Alter"]
    )
    asked: list[str] = []

    def ask(question: str, default: str | None) -> str:
        asked.append(question)
        return next(replies)

    file = semicolons(encoding="utf-8")
    values = starter_values(file, FileFormat(), NOTHING, False, ask)
    assert len(asked) == 8 and next(replies, None) is None
    write_checked(Path("asked.yaml"), starter(values))
    config = dpray.load("asked.yaml")
    assert (config.data.labels, config.data.public_size) == (("Größe", "Alter"), 500)
    assert (config.privacy.epsilon, config.method.name) == (2.0, "aug_pe")
    assert config.data.about == "letters of guests"


def test_labels_that_are_codes_get_words(folder: Path) -> None:
    (folder / "notes.csv").write_text("text,code\nMarlowe,1\nagain,2\n")
    words = {"labels": "1,2", "label": "code", "text": "text", "language": "German"}
    asked: list[str] = []

    def ask(question: str, default: str | None) -> str:
        asked.append(question)
        if "codes" in question:
            return "1: new growths, 2: heart"
        return "40" if default is None else default

    values = starter_values("notes.csv", FileFormat(), NOTHING | words, False, ask)
    write_checked(Path("asked.yaml"), starter(values))
    data = dpray.load("asked.yaml").data
    assert data.label_about == {"1": "new growths", "2": "heart"} and data.language == "German"
    assert any("`1: neoplasms`" in question for question in asked)
    file = ["init", "notes.csv", *NEEDED, "--label", "code", "--labels", "1,2"]
    assert run_command([*file, "-o", "b.yaml", "--label-about", "1"]) == 2
    assert run_command([*file, "-o", "b.yaml", "--label-about", "3: none"]) == 2
    assert run_command([*file, "-o", "b.yaml", "--label-about", "{2: heart}"]) == 0
    assert dpray.load("b.yaml").data.label_about == {"2": "heart"}


def test_prompts_say_labels_with_underscores_as_words(folder: Path) -> None:
    labels = ["--label", "code", "--labels", "card_lost,_,a__b,Top up,x_1"]
    (folder / "notes.csv").write_text("text,code\nMarlowe,card_lost\n")
    assert run_command(["init", "notes.csv", *NEEDED, *labels, "--label-about", "x_1: X"]) == 0
    assert dpray.load("notes.yaml").data.label_about == {"card_lost": "card lost", "x_1": "X"}
    # What the words are does not decide whether the names were read from private rows.
    for more, is_read in ((labels[:2], True), ([*labels[:2], "--labels", "card"], False)):
        assert run_command(["init", "notes.csv", *NEEDED, *more, "--look", "--force"]) == 0
        assert ("which are private" in Path("notes.yaml").read_text()) == is_read


@pytest.mark.parametrize(
    ("method", "prefix", "more"),
    [("aug_pe", "", []), ("dp_kps", "generation_", ["--language", "English"])],
)
def test_the_sampling_is_what_the_makers_of_the_model_recommend_or_a_careful_one(
    folder: Path, method: str, prefix: str, more: list[str]
) -> None:
    (folder / "notes.csv").write_text("text\nMarlowe\n")
    (model := folder / "model").mkdir()
    command = ["init", "notes.csv", *NEEDED, "--method", method, "--model", str(model), *more]
    for file, found in (
        ('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}', (0.6, 0.95)),
        ('{"temperature": 0, "top_p": "0.9", "eos_token_id": 2}', (0.8, 0.95)),
        ("[", (0.8, 0.95)),
    ):
        (model / "generation_config.json").write_text(file)
        assert run_command([*command, "--force"]) == 0
        written = dpray.load("notes.yaml").method
        keys = (f"{prefix}temperature", f"{prefix}top_p")
        assert tuple(getattr(written, key) for key in keys) == found


@pytest.mark.parametrize("answer", ["many", "["])
def test_an_answer_that_is_no_number(answer: str) -> None:
    replies = iter(["text", "", "", "", answer, "4", "aug_pe"])
    with pytest.raises(dpray.InputError, match="--public-size"):
        starter_values(semicolons(), FileFormat(), NOTHING, False, lambda *_: next(replies))


def test_a_known_language_brings_its_words(folder: Path, model_folder: str) -> None:
    file = semicolons(encoding="utf-8")
    options = [*NEEDED, "--language", "de", "--method", "dp_kps", "--model", model_folder]
    assert run_command(["init", file, *options]) == 0
    assert "the frequent words of data.language" in Path("notes.yaml").read_text()
    plan = dpray.plan(dpray.load("notes.yaml", "engine.kind=none"))
    assert plan.method.public_terms > 10_000


@pytest.mark.parametrize("method", ["private_prediction", "aug_pe", "dp_kps", "dp_sgd", "auto"])
def test_every_method_can_be_planned(
    folder: Path, model_folder: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = semicolons(encoding="utf-8")
    (folder / "words.txt").write_text("house\ngarden\n")
    options = [*NEEDED, "--method", method, "--model", model_folder]
    with_words = [*options, "--vocabulary", "words.txt"]
    takes_words = method in ("dp_kps", "auto")
    assert run_command(["init", file, *with_words]) == (0 if takes_words else 2)
    if not takes_words:
        assert "--vocabulary: only --method dp_kps and auto" in capsys.readouterr().err
        assert run_command(["init", file, *options]) == 0
    config = dpray.load("notes.yaml", "engine.kind=transformers")
    assert config.method.name == method
    if method == "auto":
        assert config.method.model_dump()["dp_kps"] == {"vocabulary": "words.txt"}
        capsys.readouterr()
        assert run_command(["init", file, *options, "--force"]) == 0
        commands = re.findall(r"dpray (\w+) ([^#]+)  #", capsys.readouterr().out)
        # The other commands take no `auto`.
        assert commands[0] == ("plan", "notes.yaml --write notes-chosen.yaml")
        assert {file for _, file in commands[1:]} == {"notes-chosen.yaml"}
        assert dpray.load("notes.yaml").method.model_dump()["dp_kps"] == {}
    if method != "auto":  # a question to `dpray plan`
        plan = dpray.plan(config)
        assert plan.cost.epsilon <= 4
        # What the model does ends in ten minutes on two CPU cores, a training in an hour.
        rates = rates_here(config)
        assert rates is not None
        assert Forecast.of(plan.work, rates, config).hours <= (1 if method == "dp_sgd" else 1 / 6)
        assert "the model takes up to about" in (folder / "notes.yaml").read_text()


@pytest.mark.parametrize(
    ("size", "speed", "passes", "batch", "rate"),
    [
        (300, 170, 10, 64, 0.005),
        (1000, 170, 3, 64, 0.005),
        (4000, 170, 1, 125, 0.005),
        (60_000, 170, 0.03, 64, 0.005),
        (2_000_000, 170, 0.001, 64, 0.005),
        (4000, 2000, 10, 125, None),
        (4000, 20_000, 50, 1000, None),
    ],
)
def test_a_short_training_has_many_steps(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    speed: float,
    passes: float,
    batch: int,
    rate: float | None,
) -> None:
    """The larger the data, the smaller the part of it that a first training sees on a CPU."""
    rates = Rates(prefill=1e6, decode=1e6, train=speed)
    monkeypatch.setattr("dpray.commands.init.rates_here", lambda config: rates)
    options = ["--method", "dp_sgd", "--public-size", str(size)]
    assert run_command(["init", semicolons(encoding="utf-8"), *NEEDED, *options]) == 0
    method = dpray.load("notes.yaml").method.model_dump()
    found = [method[key] for key in ("epochs", "batch_size", "learning_rate")]
    assert found == [passes, batch, rate]


def test_the_usual_delta_is_far_below_one_in_the_records() -> None:
    for size in (1, 9, 10, 4000, 99_999):
        assert usual_delta(size) <= 0.1 / size


def test_values_that_yaml_could_misread(folder: Path) -> None:
    file = semicolons(encoding="utf-8")
    labels = 'no,1e3,0x10,"0", - a: b,#c,~'
    options = ["--label", "Art", "--labels", labels, "--dataset", "null", "--out", "1:30"]
    assert run_command(["init", file, *NEEDED, *options]) == 0
    config = dpray.load("notes.yaml")
    assert config.data.labels == ("no", 1000.0, "0x10", "0", "- a: b", "#c", "~")
    assert (config.privacy.dataset, config.output.path) == ("null", "1:30")


COMMAS = st.lists(
    st.text("abc, \"\\'[]{}:#é", max_size=6).map(str.strip) | st.integers() | st.booleans(),
    min_size=1,
    max_size=4,
)


@given(COMMAS)
def test_a_label_with_a_comma_has_a_spelling(labels: list[Any]) -> None:
    assert read_labels(", ".join(json.dumps(label) for label in labels)) == labels
    assert read_labels(json.dumps(labels)) == labels


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        ('"Heart, lungs",Skin', ["Heart, lungs", "Skin"]),
        ('Skin, "Heart, lungs" ', ["Skin", "Heart, lungs"]),
        ('["Heart, lungs", Skin]', ["Heart, lungs", "Skin"]),
        ('5" pipe,6" pipe', ['5" pipe', '6" pipe']),
        ('"Heart" or lungs,Skin', ['"Heart" or lungs', "Skin"]),
        ("[a],[b]", ["[a]", "[b]"]),
        ('1,1.5,true,True,"1",,007', [1, 1.5, True, "True", "1", "", "007"]),
    ],
)
def test_words_of_a_label_set(words: str, labels: list[Any]) -> None:
    found = read_labels(words)
    assert found == labels and list(map(type, found)) == list(map(type, labels))


def test_dates_and_columns_within_lists_are_labels_and_columns(folder: Path) -> None:
    days = [date(2024, 1, 1), None, date(2024, 2, 1)]
    rows = [{"notes": [{"text": "Marlowe", "day": day}], "day": day} for day in days]
    pq.write_table(pa.Table.from_pylist(rows), "notes.parquet")
    file = ["init", "notes.parquet", *NEEDED, "--text", "notes.0.text", "--look"]
    assert run_command([*file, "--label", "day"]) == 0
    data = dpray.load("notes.yaml").data
    assert data.labels == ("2024-01-01", "2024-02-01") and data.text == "notes.0.text"
    [_, second, third] = [to_row(Where("a", n), row, data) for n, row in enumerate(rows[:1] * 3)]
    assert second and third and third["label"] == "2024-01-01"
    assert run_command([*file, "--label", "notes.0", "--force"]) == 2


def test_the_signs_of_csv_and_the_key_of_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.csv").write_text("text,label\n'Marlowe, here',a\n'it\\'s',b\n")
    look = ["--label", "label", "--look"]
    assert run_command(["init", "a.csv", *NEEDED, *look]) == 2
    assert "not as many fields" in capsys.readouterr().err
    signs = ["--quote", "'", "--escape", "\\"]
    assert run_command(["init", "a.csv", *NEEDED, *look, *signs]) == 0
    data = dpray.load("a.yaml").data
    assert (data.quote, data.escape, data.labels) == ("'", "\\", ("a", "b"))
    (folder / "b.csv").write_text('text,label\nDer "Käse",a\n"x,b\n')
    assert run_command(["init", "b.csv", *NEEDED, *look]) == 2
    for key in re.findall(r"--\w+", capsys.readouterr().err):
        assert run_command(["init", "b.csv", *NEEDED, *look, key, "several signs"]) == 2
        assert key in capsys.readouterr().err, "there is such an option"
    assert run_command(["init", "b.csv", *NEEDED, *look, "--quote", ""]) == 0
    assert dpray.load("b.yaml").data.quote == ""
    for typed in ("data.quote=", 'data.quote=""', "data.quote=''", "data.quote=null"):
        assert dpray.load("a.yaml", typed).data.quote == ""
    (folder / "c.json").write_text('{"page": {"tickets": [{"text": "Marlowe"}]}}')
    assert run_command(["init", "c.json", *NEEDED]) == 2
    assert "set --records=page.tickets" in capsys.readouterr().err
    assert run_command(["init", "c.json", *NEEDED, "--records=page.tickets"]) == 0
    assert dpray.load("c.yaml").data.records == "page.tickets"


OTHER = {"cp932": ["ログイン", "請求"], "cp1251": ["Вход", "Счёт"]}


@pytest.mark.parametrize("encoding", OTHER)
def test_an_encoding_in_doubt_is_a_question(
    folder: Path, capsys: pytest.CaptureFixture[str], encoding: str
) -> None:
    """No label comes into a configuration in other letters than the file's own."""
    labels = OTHER[encoding]
    rows = "".join(f"{label} Marlowe,{label}\r\n" for label in labels)
    Path("a.csv").write_bytes(f"text,label\r\n{rows}".encode(encoding))
    look = ["init", "a.csv", *NEEDED, "--label", "label", "--look"]
    assert run_command(look) == 2
    said = capsys.readouterr().err
    assert "a.csv: not in UTF-8; give --encoding, the one whose words are right: " in said
    assert f"{encoding} (" in said and labels[0] in said and said.count("\n") == 1
    assert not Path("a.yaml").exists()
    assert run_command([*look, "--encoding", encoding]) == 0
    assert dpray.load("a.yaml").data.labels == tuple(sorted(labels))
    # Labels that a person types are found with one encoding.
    assert run_command([*look, "--force", "--labels", ",".join([*labels, "other"])]) == 0
    assert dpray.load("a.yaml").data.encoding == encoding
    # Without --look no word of a row is shown, and none is needed.
    assert run_command(["init", "a.csv", *NEEDED, "--force"]) == 0
    assert dpray.load("a.yaml").data.encoding is None
    asked: list[str] = []

    def ask(question: str, default: str | None) -> str:
        asked.append(question)
        return encoding

    form = in_encoding(["a.csv"], FileFormat(), [], True, ask)
    assert form.encoding == encoding and labels[0] in asked[0]
    for answer in ("utf-8", "none of these"):
        with pytest.raises(dpray.InputError, match="--encoding"):
            in_encoding(["a.csv"], FileFormat(), [], True, lambda *_, answer=answer: answer)


def test_a_header_in_another_encoding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its words are shown without --look: a header is no record."""
    Path("a.csv").write_bytes("Текст,Метка\nMarlowe,x\n".encode("cp1251"))
    options = ["--label", "Метка", "--labels", "x", "--public-size", "9", "--epsilon", "4"]
    assert run_command(["init", "a.csv", "--text", "Text", *options[2:]]) == 2
    said = capsys.readouterr().err
    assert "cp1251 (Cyrillic: Текст, Метка); " in said and "Marlowe" not in said
    assert run_command(["init", "a.csv", "--text", "Текст", *options]) == 0
    assert dpray.load("a.yaml").data.encoding == "cp1251"


def test_files_in_several_encodings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "a.csv").write_bytes("text\nGröße\n".encode("cp1252"))
    (folder / "d" / "b.csv").write_bytes("text\nGröße\n".encode())
    assert run_command(["init", "d", *NEEDED, "--look"]) == 2
    said = "a.csv: not all is in UTF-8, and b.csv is; save all in UTF-8"
    assert said in capsys.readouterr().err
    (folder / "d" / "a.csv").write_bytes("text\nGröße\nKäse\n".encode() + b"\xe9\n")
    assert run_command(["init", "d", *NEEDED, "--look"]) == 2
    assert "a.csv: not all is in UTF-8, and most lines are" in capsys.readouterr().err


@pytest.mark.parametrize("titles", ["Export,\n,\n", "Export of notes, 2024, all\n\n"])
def test_titles_above_a_header(
    folder: Path, capsys: pytest.CaptureFixture[str], titles: str
) -> None:
    Path("a.csv").write_text(titles + "note,kind\n" + "Marlowe,a\n" * 3)
    options = ["--text", "note", "--public-size", "9", "--epsilon", "4"]
    assert run_command(["init", "a.csv", *options]) == 2
    assert "Marlowe" not in capsys.readouterr().err
    assert run_command(["init", "a.csv", *options, "--look", "--label", "kind"]) == 0
    data = dpray.load("a.yaml").data
    assert data.skip_rows == titles.count("\n") and data.labels == ("a",)
    check_first_records(data)


@pytest.mark.parametrize("start", ["text\n", "text,kind,,\n"])
def test_a_table_without_titles(folder: Path, start: str) -> None:
    rows = "".join(f"{n}{', and more' * start.count(',')}\n" for n in range(9))
    Path("a.csv").write_text(start + rows)
    assert run_command(["init", "a.csv", *NEEDED, "--look"]) == 0
    assert dpray.load("a.yaml").data.skip_rows == 0


def test_a_header_of_one_column_says_what_it_may_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.csv").write_text("note~kind\nMarlowe~a\n")
    assert run_command(["init", "a.csv", *NEEDED, "--text", "note"]) == 2
    assert "there are: note~kind; --delimiter '~' divides it" in capsys.readouterr().err
    Path("b.csv").write_text("All notes\nnote,kind\nMarlowe,a\n")
    assert run_command(["init", "b.csv", *NEEDED, "--text", "note"]) == 2
    said = capsys.readouterr().err
    assert "if that is a title, give --skip-rows" in said and "Marlowe" not in said
    assert run_command(["init", "b.csv", *NEEDED, "--text", "note", "--skip-rows", "1"]) == 0
    Path("c.csv").write_text("note,kind,kind\nMarlowe,a,b\n")
    assert run_command(["init", "c.csv", *NEEDED, "--text", "note"]) == 0
    assert run_command(["init", "c.csv", *NEEDED, "--label", "kind", "--force"]) == 2
    assert "--label: column 'kind' is named twice" in capsys.readouterr().err


def test_labels_of_folders(folder: Path) -> None:
    for label in ("b", "a%20c", "x"):
        (folder / "d" / f"kind={label}").mkdir(parents=True)
        (folder / "d" / f"kind={label}" / "1.csv").write_text("text\nx\n")
    (folder / "d" / "kind=x" / "2.csv").write_text("text\n")
    assert run_command(["init", "d", *NEEDED, "--label", "kind", "--look"]) == 0
    assert dpray.load("d.yaml").data.labels == ("a c", "b", "x")


LETTERS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/")


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(LETTERS, min_size=1, max_size=70).filter(lambda name: len(name.encode()) < 200))
def test_whatever_the_file_is_called_the_configuration_loads(folder: Path, name: str) -> None:
    """Or the name is refused, and nothing is written."""
    file, made = folder / f"x{name}.jsonl", folder / "made.yaml"
    made.unlink(missing_ok=True)
    file.write_text('{"text": "Marlowe"}\n')
    try:
        code = run_command(["init", str(file), *NEEDED, "-o", str(made)])
    finally:
        file.unlink()
    assert (code == 0) == made.exists()
    if re.fullmatch(r"[\w .-]+", name):
        assert code == 0
    if code == 0:
        config = dpray.load(made)
        assert config.data.path == str(file)
        assert check_name(config.privacy.dataset) == config.privacy.dataset


@pytest.mark.parametrize("name", ["Notizen M\u00e4rz", "\u6570\u636e", "null", 'say "x" ' * 20])
def test_what_init_writes_is_planned_and_run(folder: Path, name: str) -> None:
    lines = [
        {"text": f"the invoice of caller {n % 5} is open", "label": "ab"[n % 2]} for n in range(24)
    ]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "words.txt").write_text("invoice\ncaller\nopen\nclosed\n")
    method = ["--method", "dp_kps", "--vocabulary", "words.txt"]
    options = ["--label", "label", "--labels", "a,b", *method]
    size = ["--public-size", "24", "--epsilon", "50"]
    assert run_command(["init", str(file), *options, *size, "-o", "made.yaml"]) == 0
    quick = (
        "engine.kind=none", "runtime.ray_address=none", "method.vocabulary_size=3",
        "method.sequence_length=2", "method.records=4",
    )  # fmt: skip
    config = dpray.load("made.yaml", *quick)
    assert dpray.plan(config).cost.epsilon <= 50
    assert len(dpray.run(config).records) == 4


def test_names_that_lose_letters_stay_two_names() -> None:
    names = ["\u6570\u636e", "\u8d44\u6599", "M\u00e4rz", "\u041c\u0430\u0440\u0442", "data"]
    assert len({*map(dataset_name, names)}) == len(names)


@pytest.mark.parametrize("name", ["Notizen M\u00e4rz", "", "x" * 201])
def test_a_name_that_the_ledger_refuses_is_refused_when_it_is_read(folder: Path, name: str) -> None:
    file = semicolons(encoding="utf-8")
    assert run_command(["init", file, *NEEDED, "-o", "made.yaml"]) == 0
    with pytest.raises(dpray.InputError, match=r"^privacy\.dataset: "):
        dpray.load("made.yaml", f"privacy.dataset={json.dumps(name)}")
    assert run_command(["init", file, *NEEDED, "-o", "other.yaml", "--dataset", name]) == 2
    assert not (folder / "other.yaml").exists()


def test_a_person_with_several_rows_is_asked_for(folder: Path) -> None:
    (folder / "notes.csv").write_text("text,Kunde,date\nMarlowe,1,x\n")
    asked: dict[str, str] = {}

    def ask(question: str, default: str | None) -> str:
        answers = {"person": "Kunde", "estimate": "40", "column of the text": "text"}
        answer = next((a for words, a in answers.items() if words in question), default or "")
        return asked.setdefault(question, answer)

    values = starter_values("notes.csv", FileFormat(), NOTHING, False, ask)
    [question] = [each for each in asked if "person" in each]
    assert question.endswith("(perhaps Kunde)")
    write_checked(Path("asked.yaml"), starter(values))
    assert dpray.load("asked.yaml").data.unit == "Kunde"


@pytest.mark.parametrize(
    ("option", "unit"), [((), None), (("--no-unit",), None), (("--unit", "Art"), "Art")]
)
def test_the_unit_of_an_option(folder: Path, option: tuple[str, ...], unit: str | None) -> None:
    file = semicolons(encoding="utf-8")
    assert run_command(["init", file, *NEEDED, "-o", "made.yaml", *option]) == 0
    assert dpray.load("made.yaml").data.unit == unit
    assert ("unit: COLUMN" in Path("made.yaml").read_text(encoding="utf-8")) == (unit is None)
    both = ["--unit", "Art", "--no-unit", "-o", "both.yaml"]
    assert run_command(["init", file, *NEEDED, *both]) == 2
