"""`evaluate` ranks what it should, and refuses what it cannot measure."""

import json
import random
import warnings
import zlib
from collections import Counter

import numpy as np
import pytest

from dpray.evaluation import NOT_FOR_RELEASE
from dpray.evaluation.downstream import Embedded, logistic_regression
from dpray.evaluation.evaluate import evaluate, split, verdict
from dpray.evaluation.texts import parsed_record
from dpray.io.columns import cut_advice
from dpray.types import InputError

WORDS = {
    "cardio": ["heart", "pulse", "valve", "artery", "beat", "chest"],
    "derma": ["skin", "rash", "cream", "itch", "mole", "patch"],
}
COMMON = ["the", "patient", "was", "seen", "again", "and", "told", "to", "come", "back", "soon"]


class BagOfWords:
    """A stand-in embedder: hashed word counts, L2-normalised."""

    dimension = 64

    def embed(self, texts):
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row, zlib.crc32(word.encode()) % self.dimension] += 1
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def notes(count: int, seed: int, signal: float = 1.0, words: int = 12):
    """Labelled notes; `signal` is the chance that a label's own words are used at all."""
    rng = random.Random(seed)
    records = []
    for index in range(count):
        label = sorted(WORDS)[index % 2]
        source = COMMON + (WORDS[label] if rng.random() < signal else [])
        length = max(3, round(rng.gauss(words, 2)))
        records.append((" ".join(rng.choices(source, k=length)), label))
    return records


def test_synthetic_lies_between_floor_and_ceiling():
    result = evaluate(notes(400, 1), notes(200, 2, signal=0.4), BagOfWords())

    accuracy = {k: result["downstream"][k]["accuracy"]["mean"] for k in ("synthetic", "ceiling")}
    floor = result["downstream"]["floor"]
    assert floor["kind"] == "majority class"
    assert floor["accuracy"]["mean"] == pytest.approx(0.5, abs=0.05)
    assert floor["accuracy"]["mean"] + 0.1 < accuracy["synthetic"] <= accuracy["ceiling"]
    assert accuracy["ceiling"] > 0.9
    assert result["downstream"]["ceiling"]["accuracy"]["deviation"] > 0
    assert result["downstream"]["seeds"] == 5


def test_labels_at_random_are_at_the_floor_and_swapped_labels_below_it():
    real, synthetic = notes(400, 1), notes(200, 2)
    shuffled = [label for _, label in synthetic]
    random.Random(3).shuffle(shuffled)
    noise = [(text, label) for (text, _), label in zip(synthetic, shuffled, strict=True)]
    other = {"cardio": "derma", "derma": "cardio"}
    swapped = [(text, other[label]) for text, label in synthetic]

    def accuracy(records):
        found = evaluate(real, records, BagOfWords(), seeds=2)["downstream"]["synthetic"]
        return found["accuracy"]["mean"]

    assert accuracy(synthetic) > 0.9
    assert 0.2 < accuracy(noise) < 0.8
    assert accuracy(swapped) < 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda label: f"{label} ", '"derma" of the real records is "derma " in the synthetic '
         "ones, and counts as another label: they differ in blanks"),
        (str.upper, "they differ in case"),
        (lambda label: label.replace("e", "e\u0301"), '"derma" of the real'),
        (lambda label: "skin", '1 labels of 100 real records are in no synthetic record: "derma"'),
        (lambda label: label, None),
    ],
)  # fmt: skip
def test_labels_that_one_side_lacks_are_named(change, said):
    """A classifier cannot find a label that it was not trained on."""
    synthetic = [
        (text, change(label) if label == "derma" else label) for text, label in notes(200, 2)
    ]
    result = evaluate(notes(200, 1), synthetic, BagOfWords(), train=notes(100, 3), seeds=1)
    found = [warning for warning in result["warnings"] if "label" in warning]
    if said is None:
        assert found == []
        return
    accuracy = result["downstream"]["synthetic"]["accuracy"]["mean"]
    assert accuracy < 0.6 and any(said in warning for warning in found)


def test_labels_that_may_be_texts_are_not_shown():
    secret = "Marlowe was here, and on the day after he was here again"
    real = [*notes(100, 1), *((f"word {n}", f"{secret} {n}") for n in range(30))]
    result = evaluate(real, notes(100, 2), BagOfWords(), train=notes(100, 3), seeds=1)
    found = [warning for warning in result["warnings"] if "label" in warning]
    sides = ("synthetic", "train")
    assert found == [f"30 labels of 30 real records are in no {side} record" for side in sides]
    capitals = [(text, label.upper()) for text, label in notes(100, 2)]
    with pytest.raises(InputError, match=r"no label in common .*; they differ in case"):
        evaluate(notes(100, 1), capitals, BagOfWords())


def test_a_floor_file_and_a_train_file_are_used():
    real, train = notes(200, 1), notes(300, 5)
    sets = {"train": train, "floor": notes(100, 3, signal=0.0)}
    result = evaluate(real, notes(200, 2), BagOfWords(), **sets, seeds=2)

    assert result["test_records"] == 200
    assert result["downstream"]["ceiling"]["train_records"] == 300
    floor = result["downstream"]["floor"]
    assert floor["kind"] == "file" and floor["train_records"] == 100
    assert floor["accuracy"]["mean"] < 0.75
    assert result["records"]["floor"] == {"cardio": 50, "derma": 50}


def test_the_split_ignores_the_order_and_keeps_copies_together():
    real = notes(300, 1)
    train, test = split(real + real)

    assert not {t for t, _ in train} & {t for t, _ in test}
    assert min(len(train), len(test)) > 200
    assert sorted(split(list(reversed(real)))[0]) == sorted(split(real)[0])


def test_the_result_is_repeatable_plain_json_and_says_it_is_not_private():
    first = evaluate(notes(100, 1), notes(60, 2), BagOfWords(), seeds=2)

    assert first == evaluate(notes(100, 1), notes(60, 2), BagOfWords(), seeds=2)
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert first["private"] == NOT_FOR_RELEASE == "computed from private data; not for release"


def test_lengths_are_measured_in_words_against_a_real_yardstick():
    result = evaluate(notes(400, 1), notes(200, 2, words=22), BagOfWords(), seeds=2)["lengths"]

    distance = result["wasserstein"]
    assert distance["synthetic_to_real"]["mean"] == pytest.approx(10, abs=1)
    assert distance["real_to_real"]["mean"] < 1
    assert distance["real_to_real"]["deviation"] > 0
    assert distance["sample_size"] <= 200
    assert result["synthetic"]["mean"] == pytest.approx(22, abs=1)
    assert list(result["real"]["quantiles"]) == ["0.05", "0.25", "0.5", "0.75", "0.95"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"synthetic": []}, "synthetic records: there are none"),
        ({"real": []}, "real records: there are none"),
        ({"synthetic": [("a", "x"), ("b", "y")]}, "synthetic records: no label in common"),
        ({"floor": [("a", "x"), ("b", "y")]}, "floor records: no label in common"),
        ({"real": [("a", "cardio"), ("b", "derma")]}, "half of the real records"),
        ({"real": [("a", "cardio"), ("a", "derma")] * 20}, "real records: all have one text"),
        ({"synthetic": notes(4, 2)}, "synthetic records: 4 are too few, it takes 8"),
        ({"real": notes(12, 1)}, "half of the real records: . are too few"),
        ({"train": notes(6, 3)}, "train records: 6 are too few"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(change, message):
    arguments = {"real": notes(40, 1), "synthetic": notes(40, 2), "embedder": BagOfWords()}

    with pytest.raises(InputError, match=message) as caught:
        evaluate(**(arguments | change))
    assert "\n" not in str(caught.value)


def test_records_without_labels_are_measured_without_a_classifier():
    real, synthetic = ([(text, None) for text, _ in notes(60, seed)] for seed in (1, 2))
    result = evaluate(real, synthetic, BagOfWords(), seeds=2)
    assert result["downstream"] is None
    near = result["fidelity"]["measures"]["frechet_distance"]["synthetic_to_real"]["mean"]
    far = evaluate(real, [("zebra quartz", None)] * 60, BagOfWords(), seeds=2)
    measures = far["fidelity"]["measures"]
    assert measures["frechet_distance"]["synthetic_to_real"]["mean"] > 2 * near
    assert measures["mauve"]["synthetic_to_real"]["mean"] < 0.1
    assert "only 2% of the synthetic texts are different ones" in far["warnings"]


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"real": None}, "real records have no label"),
        ({"synthetic": None, "real": None, "floor": "derma"}, "real records have no label"),
        ({"synthetic": "cardio"}, "synthetic records all have one label"),
        ({"real": "cardio", "synthetic": "cardio"}, "real records all have one label"),
        ({"train": "cardio"}, "train records all have one label"),
    ],
)
def test_without_two_labels_on_each_side_all_but_the_classifier_is_measured(
    labels: dict[str, str | None], why: str
) -> None:
    sets = {name: notes(60, seed) for seed, name in enumerate(("real", "synthetic", "train"))}
    for name, label in labels.items():
        sets[name] = [(text, label) for text, _ in sets.get(name) or notes(60, 4)]
    result = evaluate(sets.pop("real"), sets.pop("synthetic"), BagOfWords(), seeds=2, **sets)
    assert result["downstream"] is None and result["fidelity"]["measures"]
    assert f"no classifier was trained: the {why}" in result["warnings"]


def test_copies_of_private_records_stand_out_against_held_out_ones():
    private, test = notes(200, 1), notes(200, 5)
    copied = private[:50] + notes(50, 2)

    copies = evaluate(test, copied, BagOfWords(), train=private, seeds=1)["copies"]

    assert copies["private_records"] == 200 and copies["records_a_side"] == 100
    assert copies["synthetic"]["exact_share"] == 0.5 and copies["held_out"]["exact_share"] == 0.0
    assert copies["synthetic"]["longest_shared_words"]["quantile_95"] > 12
    assert copies["held_out"]["longest_shared_words"]["max"] < 9
    assert copies["synthetic"]["ngram_overlap"]["max"] == 1.0
    assert copies["synthetic"]["nearest_cosine"]["max"] == pytest.approx(1.0)


def test_topics_show_what_the_synthetic_records_leave_out():
    synthetic = [(text, label) for text, label in notes(300, 2) if label == "cardio"]
    synthetic += [("the patient was seen again and told to come back soon", "derma")] * 10

    sets = {"train": notes(300, 3)}
    topics = evaluate(notes(300, 1), synthetic, BagOfWords(), **sets, seeds=1)["topics"]

    sides = ("real", "other_real", "synthetic")
    shares = {side: [topic[side] for topic in topics] for side in sides}
    assert all(sum(of_side) == pytest.approx(1.0) for of_side in shares.values())
    assert shares["real"] == sorted(shares["real"], reverse=True)
    missing = [topic for topic in topics if topic["synthetic"] < 0.02 < topic["real"]]
    known = {*WORDS["derma"], *COMMON}
    assert missing and all({*topic["terms"][:3]} <= known for topic in missing)


@pytest.mark.parametrize("kind", ["synthetic", "train"])
def test_identical_texts_are_measured_and_said(kind):
    same = [("the same text", ("cardio", "derma")[i % 2]) for i in range(40)]
    sets = {"synthetic": notes(40, 2), "train": notes(40, 3)} | {kind: same}

    found = evaluate(notes(40, 1), sets["synthetic"], BagOfWords(), train=sets["train"], seeds=1)

    assert json.loads(json.dumps(found, allow_nan=False)) == found
    said = [warning for warning in found["warnings"] if "different ones" in warning]
    assert len(said) == (kind == "synthetic")


def test_many_labels_of_few_records_are_no_warning():
    labels = np.array([f"label {n % 20}" for n in range(30)])
    with warnings.catch_warnings(action="error"):
        logistic_regression(Embedded(np.eye(3, dtype=np.float32)[np.arange(30) % 3], labels))


def test_a_text_is_parsed_once(monkeypatch):
    parsed = Counter()

    def parse(text):
        parsed[text] += 1
        return parsed_record(text)

    monkeypatch.setattr("dpray.evaluation.evaluate.parsed_record", parse)
    sets = ([(f'{{"a": "{text}"}}', label) for text, label in notes(60, k)] for k in (1, 2, 3))
    real, synthetic, train = sets
    found = evaluate(real, synthetic, BagOfWords(), train=train, seeds=1)
    assert found["structure"]["real"]["json_parse_share"] == 1.0 and found["columns"] is not None
    assert parsed.keys() == {text for side in (real, synthetic, train) for text, _ in side}
    assert {*parsed.values()} == {1}


def test_an_evaluation_ends_with_one_sentence():
    def result(made, found):
        sides = {"synthetic": made, "ceiling": 0.9, "floor": 0.3}
        distance = {"synthetic_to_real": {"mean": 1.42}, "real_to_real": {"mean": 1.09}}
        return {
            "downstream": {side: {"accuracy": {"mean": of}} for side, of in sides.items()},
            "fidelity": {"measures": {"frechet_distance": distance}},
            "replays": {"kinds": {"numbers": {"found": found, "expected": 1.0}}},
        }

    near = verdict(result(0.8, 1), 0.75, {"name": "dp_sgd"})
    assert near.startswith("For training a classifier, these texts are nearer to real texts: ")
    assert "distance is 1.42, that of real texts 1.09" in near
    assert near.endswith(f"; {cut_advice(0.75, {'name': 'dp_sgd'})}.")
    assert "repeat" not in near
    far = verdict(result(0.4, 9) | {"downstream": None}, None)
    assert "more strings of one private record than chance does (9 numbers)." in far
    assert "nearer to the floor" in verdict(result(0.4, 1), 0.1)
    assert "no better than the floor: accuracy 0.20, floor 0.30" in verdict(result(0.2, 1), None)
    assert "cut" not in verdict(result(0.4, 1), 0.1)
