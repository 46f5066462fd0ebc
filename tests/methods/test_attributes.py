"""Private prediction, Aug-PE and DP-KPS write texts for attributes that are drawn from noisy
histograms. DP-SGD does, too: tests/methods/dp_sgd/test_attributes.py."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import WorkerCrashedError

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Composed
from dpray.config.config import Config
from dpray.engines.base import EngineError
from dpray.evaluation.compare import compare
from dpray.mechanisms.attributes import PairHistograms
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.methods.private_prediction import release
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.runs import runner, session
from dpray.runs.plan import label_histogram
from dpray.runs.preview import preview
from dpray.types import InputError, Prompt, Resumable, no_progress
from dpray.workers import shards
from tests.engines.bag_of_words import BagOfWords
from tests.engines.kept import Kept
from tests.workers.outcomes import lines

pytestmark = pytest.mark.usefixtures("one_thread")

METHODS: dict[str, dict[str, Any]] = {
    "private_prediction": {
        "batches": "disjoint", "batch_size": 5, "max_tokens": 4, "max_records": 12,
        "clip_bound": 1.0,
    },
    "aug_pe": {
        "records": 24, "iterations": 2, "variations": 2, "max_tokens": 4, "word_var": None,
    },
    "dp_kps": {
        "vocabulary_size": 6, "phrases_per_record": 3, "sequence_length": 2, "records": 24,
        "stop_words": "keep", "label_in_prompt": True, "max_tokens": 4, "document_type": "note",
    },
}  # fmt: skip
ATTRIBUTES = {"stars": [1, 5], "city": ["x", "other"]}


class Asked(Kept):
    """Keeps the prompts that reach the real engine, and breaks it once `left` are answered."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.prompts: list[str] = []
        self.left = 10**9

    def encode(self, prompt: Prompt) -> Any:
        self.prompts.append(f"{prompt.user}\n{prompt.prefix}")
        return self.engine.encode(prompt)

    def generate(self, prompts: Any, sampling: Any, on_completion: Any = None) -> Any:
        if self.left < len(prompts):
            raise EngineError("the endpoint answered with HTTP status 500")
        self.left -= len(prompts)
        return self.engine.generate(prompts, sampling, on_completion)

    def run(self, config: Config) -> dict[str, Any]:
        return registry.run(config, build=lambda section, **options: self)


@pytest.fixture
def asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    return Asked(engine)


@pytest.fixture
def config(
    settings: Callable[..., dict[str, Any]], records_file: Path, tmp_path: Path
) -> Callable[..., Config]:
    """Label a has 5 stars, b has 1; every third record is of city x."""
    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    rows = [
        row | {"stars": 5 if row["label"] == "a" else 1, "city": f"c{n}" if n % 3 else "x"}
        for n, row in enumerate(rows)
    ]
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = tmp_path / "words.txt"
    words.write_text("".join(f"word{n}\n" for n in range(20)))

    def make(name: str, **changes: Any) -> Config:
        method = {"name": name} | METHODS[name]
        if name == "dp_kps":
            method["vocabulary"] = str(words)
        for key in [key for key in changes if key.startswith("method__")]:
            method[key.removeprefix("method__")] = changes.pop(key)
        measured = {"data__label_proportions": "measured", "privacy__epsilon_attributes": 12.0}
        return parse_config(
            settings(**measured | {"data__attributes": ATTRIBUTES} | changes | {"method": method})
        )

    return make


def seen(run: Config) -> Counter[tuple[object, ...]]:
    return Counter((each["label"], each["stars"], each["city"]) for each in lines(run))


@pytest.mark.parametrize("method", METHODS)
def test_each_text_is_written_for_a_measured_combination(
    config: Callable[..., Config], asked: Asked, method: str
) -> None:
    run = config(method)
    report = asked.run(run)
    assert report["epsilon"] <= run.privacy.epsilon
    found = seen(run)
    # Of sixty records, the counts have noise of standard deviation 1.
    usual = sum(n for (label, stars, _), n in found.items() if (label == "a") == (stars == 5))
    assert usual > 0.8 * found.total() > 0
    assert report["public_inputs"]["attributes"] == ATTRIBUTES
    assert "Marlowe" not in (Path(run.output.path) / "synthetic.jsonl").read_text()
    if method == "private_prediction":
        for values in ("stars: 5, city: other", "stars: 1, city: other"):
            assert any(values in prompt for prompt in asked.prompts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", [None, "left out of the charge"])
def test_the_histograms_are_charged_with_the_method(
    config: Callable[..., Config], method: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is not None:
        monkeypatch.setattr("dpray.runs.plan.with_spent", lambda config, event: event)
    plan = registry.make_plan(config(method))
    histogram = label_histogram(plan.config)
    assert histogram is not None and plan.cost.epsilon <= plan.config.privacy.epsilon
    charged = plan.dp_event == Composed((histogram.dp_event, plan.method_event))
    alone = cost(plan.method_event, plan.config.privacy.delta)
    assert charged == (alone.epsilon < plan.cost.epsilon - 1) == (fault is None)


FLAT = np.full(12, 20)
"""Noisy counts in which all combinations are as frequent."""


def exact_labels(shards: Any, histogram: PairHistograms) -> dict[str, object]:
    """Publish the counts without noise."""
    return histogram.released(np.sum(shards.each(session.LabelCounter.counts), axis=0))


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *product(METHODS, [None]),
        *product(["private_prediction", "aug_pe"], ["drawn from the real counts"]),
    ],
)
def test_records_reach_the_draw_through_noisy_counts_only(
    config: Callable[..., Config],
    asked: Asked,
    method: str,
    fault: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two worlds whose records have other attributes, the same noisy counts and the same salt
    give each text the same attributes; the prompts of private prediction are the same."""
    monkeypatch.setattr(PairHistograms, "__call__", lambda self, counts_N: FLAT)
    monkeypatch.setattr(runner, "new_salt", lambda: "ab" * 16)
    if fault is not None:
        monkeypatch.setattr(session, "noisy_labels", exact_labels)
    worlds = []
    for world in "one", "two":
        ledger = f"sqlite:///{tmp_path}/{world}.db"
        places: dict[str, Any] = {"output__path": str(tmp_path / world), "privacy__ledger": ledger}
        if method == "private_prediction":  # all batches are decoded
            places |= {"method__max_records": None, "method__private_tokens": 4}
        run = config(method, **places)
        file = Path(run.data.path)
        if world == "two":
            rows = [json.loads(line) | {"city": "x"} for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        asked.prompts.clear()
        report = asked.run(run)
        assert report["epsilon"] > 0
        # A batch may give no text, so that its prompts are compared; the probe of the engine has
        # random ones of its own.
        prompts = {prompt for prompt in asked.prompts if "stars: " in prompt}
        worlds.append(prompts if method == "private_prediction" else seen(run))
    assert (worlds[0] == worlds[1]) == (fault is None)


def test_all_prompts_of_a_batch_name_the_same_attributes(
    config: Callable[..., Config], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its records have: the combination is a function of the batch's name."""
    of_batch: dict[str, set[str]] = {}
    encoded = BatchDecoder._encoded

    def watching(self: BatchDecoder, batch_id: str, texts: list[str]) -> Any:
        asked.prompts.clear()
        batch = encoded(self, batch_id, texts)
        named = {line for prompt in asked.prompts for line in prompt.splitlines()}
        of_batch[batch_id] = {line for line in named if line.startswith("stars: ")}
        assert len(batch.private_prompts) == len(texts)
        return batch

    monkeypatch.setattr(BatchDecoder, "_encoded", watching)
    run = config("private_prediction")
    asked.run(run)
    assert of_batch and {len(named) for named in of_batch.values()} == {1}
    assert len(set.union(*of_batch.values())) > 1
    for record in lines(run):
        said = f"stars: {record['stars']}, city: {record['city']}"
        assert of_batch[record["batch"]] == {said}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_cut_off_goes_on_with_the_same_draws(
    config: Callable[..., Config], asked: Asked, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The histograms are drawn once, and no later attempt fits them again."""
    measured: list[dict[str, Any]] = []
    drawn: dict[tuple[str, int], list[Any]] = {}
    measure, draw = session.noisy_labels, session.Session.drawn_values

    def measuring(*arguments: Any) -> dict[str, Any]:
        measured.append(measure(*arguments))
        monkeypatch.setattr(PairHistograms, "_fitted", None)
        return measured[-1]

    def drawing(self: Any, label: str, texts: int) -> Any:
        found = draw(self, label, texts)
        drawn.setdefault((label, texts), []).append(found)
        return found

    monkeypatch.setattr(session, "noisy_labels", measuring)
    monkeypatch.setattr(session.Session, "drawn_values", drawing)
    run = config(method)
    if method == "private_prediction":
        lost, decode = [WorkerCrashedError()], release.decode

        def losing(*arguments: Any) -> Any:
            if lost:
                raise lost.pop()
            return decode(*arguments)

        monkeypatch.setattr(release, "decode", losing)
    else:
        asked.left = 30 if method == "aug_pe" else 0
        with pytest.raises(Resumable):
            asked.run(run)
    asked.left = 10**9
    asked.run(run)
    assert len(measured) == 1 and lines(run)
    assert drawn and all(len(each) == 2 and each[0] == each[1] for each in drawn.values())


def test_votes_do_not_change_the_shares_of_attributes(
    config: Callable[..., Config], asked: Asked
) -> None:
    """As many texts of a combination are kept as were drawn, and all of a label compete for the
    votes of its records."""
    voted: list[dict[str, int]] = []
    hold = shards.noisy_votes

    def watching(voters: Any, mechanism: Any, candidates: Any) -> Any:
        voted.append({label: len(of_label) for label, of_label in candidates.items()})
        return hold(voters, mechanism, candidates)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dpray.methods.aug_pe.release.noisy_votes", watching)
        run = config("aug_pe")
        asked.run(run)
    assert [set(of) for of in voted] == [{"a", "b"}] * 2
    assert sum(voted[0].values()) == 48
    plan = registry.make_plan(run)
    kept = json.loads((Path(run.output.path) / "private" / "parts" / "labels.json").read_text())
    histogram = label_histogram(run)
    assert histogram is not None
    proportions, joint = histogram.measured(kept)
    found, total = seen(run), sum(seen(run).values())
    assert total == plan.settings.records
    for values, share in joint.items():
        label, stars, city = (value for _, value in values)
        assert abs(found[label, int(stars), city] - share * total) <= 2
    assert proportions["a"] == pytest.approx(found_share(found, "a"), abs=0.05)


def found_share(found: Counter[tuple[object, ...]], label: str) -> float:
    return sum(n for key, n in found.items() if key[0] == label) / found.total()


def test_prompts_have_room_for_the_values_of_the_most_tokens(
    config: Callable[..., Config], engine: Any
) -> None:
    """The values with the most tokens need not be the longest ones. Without room for them, a
    charged run would end at a batch that drew them."""
    values = ["the patient the patient", "zq1xj%kv7wz"]
    few, many = (len(engine.encode(Prompt(value))) for value in values)
    assert few < many
    run = config("private_prediction", data__attributes={"stars": [1, 5], "city": values})
    plan: Any = registry.make_plan(run)
    assert plan.template.template.about.attributes["city"] == values[1]
    byte_longest = plan.template.template.saying({"stars": "5", "city": values[0]})
    unseen = replace(
        plan,
        template=replace(plan.template, template=byte_longest),
        settings=plan.settings.model_copy(update={"max_tokens": 255}),
    )
    public = [plan.template.public_prompt(label) for label in run.data.label_names]
    tokens = max(len(engine.encode(prompt)) for prompt in public)
    with pytest.raises(InputError, match=rf"^method\.max_tokens: 255 and the {tokens} tokens of"):
        unseen.try_engine(engine)


class CountedItems(dict[Any, float]):
    read = 0

    def items(self) -> Any:
        self.read += 1
        return super().items()


@pytest.mark.parametrize("labelled", [True, False])
def test_the_shares_are_gone_through_once_for_all_labels(
    config: Callable[..., Config], labelled: bool
) -> None:
    """There are up to 200,000 of them, and there may be as many labels."""
    none: dict[str, Any] = {
        "data__label": None,
        "data__labels": (),
        "data__label_proportions": None,
    }
    run = config("aug_pe", **({} if labelled else none))
    combinations = product(*(product([name], of) for name, of in run.data.public_values.items()))
    joint = CountedItems({values: float(n) for n, values in enumerate(combinations)})
    plan = replace(registry.make_plan(run), joint=joint)
    labels = list(run.data.label_names) or [""]
    drawn = {label: plan.drawn_values(label, 28, np.random.default_rng(0)) for label in labels}
    assert joint.read == 1
    for place, label in enumerate(labels):
        found = Counter((each["stars"], each["city"]) for each in drawn[label])
        shares = [4 * place + n for n in range(4)]
        expected = dict(zip(product("15", ["x", "other"]), shares, strict=True))
        for values, share in expected.items():
            assert abs(found[values] - 28 * share / sum(shares)) < 1 + 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_a_preview_draws_all_combinations(
    config: Callable[..., Config], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Prompt] = []

    def generate(asked: Any, samplings: Any, on_completion: Any) -> Any:
        prompts.extend(asked)
        made = [SimpleNamespace(text="Yes.", prompt_tokens=1, completion_tokens=2,
                                finish_reason="stop") for _ in asked]  # fmt: skip
        for place, each in enumerate(made):
            on_completion(place, each)
        return made

    writer = SimpleNamespace(generate=generate, close=lambda: None, context_length=256)
    run = config(method)
    Path(run.data.path).unlink()
    monkeypatch.setattr("dpray.runs.preview.forecast_of", lambda *_: None)
    preview(registry.make_plan(run), 40, lambda *_, **__: writer, no_progress, False)
    words = " ".join(f"{prompt.user}{prompt.prefix}" for prompt in prompts)
    for stars in 1, 5:
        for city in "x", "other":
            assert f"stars: {stars}, city: {city}" in words


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dp_kps", {"engine": {"kind": "none"}}, "data.attributes: are for texts"),
        ("private_prediction", {"method__template": "yelp"}, "yelp: `user` has no {attributes}"),
        ("aug_pe", {"method__template": "yelp"}, "yelp: `random` has no {attributes}"),
        ("private_prediction", {"method__batches": "poisson"}, "measured ones are for disjoint"),
        ("aug_pe", {"privacy__delta": 0.0}, "takes a delta above 0"),
        ("aug_pe", {"privacy__epsilon_attributes": 50.0}, "epsilon_attributes: leaves nothing"),
        ("dp_kps", {"method__epsilon_kde": 40.0}, "less privacy.epsilon_attributes 12"),
        ("private_prediction", {"data__text": ["text", "stars"]}, "'stars' is another column"),
    ],
)
def test_what_does_not_fit_is_refused(
    config: Callable[..., Config], method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as wrong:
        registry.make_plan(config(method, **changes))
    assert message in str(wrong.value)


def test_sections_have_the_attributes_of_their_document(config: Callable[..., Config]) -> None:
    plan: Any = registry.make_plan(config("private_prediction", method__sections=2))
    drawn = {"0/1": {"stars": "5", "city": "x"}}
    template = type(plan.template)(**vars(plan.template) | {"drawn": drawn}).of_batch("a", "0/1")
    for section in template, template.after("The first section."):
        for prompt in section.private_prompt("A text.", "a"), section.public_prompt("a"):
            assert "stars: 5, city: x" in prompt.user and "stars: 5, city: x" in prompt.prefix


FILM = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 9}, "year": {"enum": [1994, 2001]}},
    "required": ["title", "year"],
    "additionalProperties": False,
}


def test_a_row_of_a_table_has_its_attributes_next_to_its_columns(
    config: Callable[..., Config], asked: Asked, records_file: Path
) -> None:
    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    rows = [row | {"title": f"t{n}", "year": 1994} for n, row in enumerate(rows)]
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = config("aug_pe", data__text=["title", "year"], method__schema=FILM, method__iterations=1,
                 method__max_tokens=40, method__records=4)  # fmt: skip
    asked.run(run)
    table = [json.loads(line) for line in (Path(run.output.path) / "table.jsonl").open()]
    assert table
    for row, record in zip(table, lines(run), strict=True):
        assert [*row] == ["label", "stars", "city", "title", "year"]
        assert (row["stars"], row["city"]) == (record["stars"], record["city"])


def test_methods_are_compared_with_attributes(
    auto_settings: Callable[..., dict[str, Any]],
) -> None:
    tree = auto_settings({f"word{n}": 100 for n in range(30)}, 20)
    tree["method"]["dp_sgd"] = {"max_length": 60}
    tree["data"] |= {"attributes": ATTRIBUTES, "label_proportions": "measured"}
    answers = compare(parse_config(tree)).answers
    assert [name for name, each in answers.items() if each.choice is None] == []


def test_without_labels_batches_may_be_secret(config: Callable[..., Config], asked: Asked) -> None:
    none = {"data__label": None, "data__labels": [], "data__label_proportions": None}
    keys = {"method__batches": "poisson", "method__texts": 4, "method__max_records": None}
    run = config("private_prediction", **none, **keys)
    report = asked.run(run)
    assert report["epsilon"] <= run.privacy.epsilon
    assert {record["label"] for record in lines(run)} == {None}
    assert all({"stars", "city"} <= record.keys() for record in lines(run))
