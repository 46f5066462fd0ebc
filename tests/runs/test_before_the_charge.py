"""What would make a run worthless is found before it is charged: a model that is not whole, a
prompt that private texts do not reach."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dpray.engines.schema.schema import Form, read_schema
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.methods.registry import make_plan
from dpray.types import Budget, DprayError, InputError, Progress
from tests.engines.api_server import SLOW, running_server
from tests.engines.bag_of_words import BagOfWords


@pytest.fixture
def folder(tmp_path: Path, model_folder: str) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def without_a_layer(folder: Path) -> None:
    file = folder / "model.safetensors"
    left = {name: each for name, each in load_file(file).items() if "layers.1." not in name}
    save_file(left, file, metadata={"format": "pt"})


def template(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return write


PARTS = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
CONSTANT, RAISES, CUT_OFF = "Write.", "{{ raise_exception('Marlowe') }}", "{% if messages %}"
LEFT_OUT = r"^engine\.model: the chat template of .* leaves the text of a prompt out"
UNUSABLE = r"^engine\.model: the chat template of .* cannot be used"
MISSING = r"^engine\.model: .* lacks weights, .*layers\.1\."

TEXTS: dict[str, Any] = {"method": {"name": "aug_pe", "records": 4, "iterations": 1}}
TUNED: dict[str, Any] = {
    "method": {"name": "dp_sgd", "max_length": 32, "batch_size": 20, "epochs": 1.0}
}
KPS: dict[str, Any] = {"method": {"name": "dp_kps", "estimator": "exact", "vocabulary_size": 3}}


BROKEN = [
    (without_a_layer, MISSING),
    (template(CONSTANT), LEFT_OUT),
    (template(RAISES), UNUSABLE),
    (template(CUT_OFF), UNUSABLE),
]
CASES = [({}, *each) for each in BROKEN]
CASES += [(changes, *BROKEN[1]) for changes in (TEXTS, KPS)]
CASES += [(TUNED, *BROKEN[0])]  # a model that is tuned needs no chat template


@pytest.mark.parametrize(("changes", "broken", "why"), CASES)
def test_a_model_that_would_make_the_run_worthless_costs_nothing(
    settings: Callable[..., dict[str, Any]],
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    broken: Callable[[Path], None],
    why: str,
) -> None:
    if changes is KPS:
        (tmp_path / "words.txt").write_text("cough\nfever\nbridge\nmarket\n")
        vocabulary = {"vocabulary": str(tmp_path / "words.txt"), "sequence_length": 2}
        changes = {"method": changes["method"] | vocabulary}
    monkeypatch.setattr("dpray.workers.shards.SentenceTransformerEmbedder", BagOfWords)
    broken(folder)
    config = parse_config(settings(**changes, engine__model=str(folder)))
    with closing(Ledger.create_or_open(config.privacy.ledger)) as ledger:
        ledger.create_dataset("notes", Budget(100, 1e-3), "record", "add_or_remove_one")
        before = list(ledger.export())
        with pytest.raises(InputError, match=why) as refused:
            methods.run(config)
        assert list(ledger.export()) == before
    assert str(refused.value).endswith("; nothing was charged")
    assert str(refused.value).isprintable() and "Marlowe" not in str(refused.value)


def test_a_model_that_takes_parts_is_given_parts(
    settings: Callable[..., dict[str, Any]], folder: Path
) -> None:
    template(PARTS)(folder)
    assert methods.run(parse_config(settings(engine__model=str(folder))))["records"] > 0


@pytest.mark.parametrize("r", [1, 2])
def test_batches_that_may_end_before_a_text_are_told_before_the_charge(
    settings: Callable[..., dict[str, Any]], r: int
) -> None:
    config = parse_config(settings(method__private_tokens=r))
    shown: list[Progress] = []

    def no_model(*_: Any, **__: Any) -> Any:
        raise DprayError("no model")

    with pytest.raises(InputError) as refused:
        methods.run(config, shown.append, no_model)
    assert not Path(config.privacy.ledger.removeprefix("sqlite:///")).exists()
    assert ("no model" in str(refused.value)) is (r == 2)
    assert str(refused.value).endswith("; nothing was charged")
    warnings = [each.detail for each in shown if each.is_warning]
    assert ["after 2" in each for each in warnings] == [True] * (r == 2)


@pytest.mark.parametrize("left", [0, 1])
def test_a_context_that_the_prompt_fills_has_no_room_for_a_private_text(
    settings: Callable[..., dict[str, Any]], tmp_path: Path, left: int
) -> None:
    config = parse_config(settings(method__template=str(tmp_path / "own.yaml")))
    (tmp_path / "own.yaml").write_text("user: 'a b c d {text}'\npublic: a\n")
    plan = methods.make_plan(config)
    room = plan.memory.text_room  # type: ignore[attr-defined]
    engine = config.engine.model_copy(update={"max_model_len": 256 - room + left})
    narrow = config.model_copy(update={"engine": engine})
    line = methods.make_plan(narrow).lines()["texts read"]
    assert line == f"up to {left} tokens of each (what the context leaves, engine.max_model_len)"
    if left:
        return
    with pytest.raises(InputError, match=r"^engine\.max_model_len: .* no room for a private text"):
        methods.run(narrow)
    assert not Path(config.privacy.ledger.removeprefix("sqlite:///")).exists()


def test_what_the_plan_could_not_see_is_seen_by_the_engine(
    settings: Callable[..., dict[str, Any]], engine: Any
) -> None:
    """A model on a hub has no files where the plan is made."""
    config = parse_config(settings())
    plan: Any = methods.make_plan(config)
    plan.try_engine(engine)
    long = plan.settings.model_copy(update={"max_tokens": 255})
    with pytest.raises(InputError, match=r"^method\.max_tokens: 255 and the \d+ tokens of"):
        replace(plan, settings=long).try_engine(engine)
    schema = {"regex": "(the patient ){9}"}
    form = Form(read_schema(schema), config.engine.model, "")
    with pytest.raises(InputError, match=r"^method\.max_tokens: no text of method\.schema"):
        replace(plan, form=form).try_engine(engine)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (KPS, "vocabulary"),
        (KPS, "template"),
        (KPS, "few_shot"),
        (TEXTS, "template"),
        ({"method": {"name": "private_prediction"}}, "template"),
        ({"method": {"name": "private_prediction"}}, "schema"),
    ],
)
def test_no_public_file_is_the_private_one(
    settings: Callable[..., dict[str, Any]], tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    (tmp_path / "words.txt").write_text("cough\n")
    (tmp_path / "part.json").write_text('{"rows": [{"text": "Marlowe"}]}')
    (tmp_path / "link.json").symlink_to("part.json")
    vocabulary = {"vocabulary": str(tmp_path / "words.txt")} if changes is KPS else {}
    method = changes["method"] | vocabulary | {key: str(tmp_path / "link.json")}
    chained = {"name": "chain", "methods": [{"name": "topics", "public": "x", "topics": 2}, method]}
    for each in (method, chained)[: 1 + (key == "schema")]:
        with pytest.raises(
            InputError, match=rf"^method\.{key}: .* is data\.path itself"
        ) as refused:
            make_plan(parse_config(settings(method=each, data__path=f"{tmp_path}/p*.json")))
        assert "Marlowe" not in str(refused.value)


@pytest.mark.parametrize(
    ("fault", "code", "why"),
    [
        (429, 4, "HTTP status 429"),
        (503, 4, "HTTP status 503"),
        (0, 4, r"\(APIConnectionError\)"),
        (SLOW, 4, r"\(APITimeoutError\)"),
        (401, 2, "HTTP status 401"),
        (404, 2, "HTTP status 404"),
        (400, 2, "HTTP status 400"),
    ],
    ids=["busy", "down", "lost", "late", "the key", "the path", "the call"],
)
def test_an_endpoint_that_is_busy_or_lost_may_be_asked_again(
    settings: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    code: int,
    why: str,
) -> None:
    monkeypatch.setattr("dpray.workers.shards.SentenceTransformerEmbedder", BagOfWords)
    with running_server() as server:
        server.faults = [fault] * 99
        engine = {"kind": "openai", "model": "m", "base_url": server.url, "attempts": 2}
        if fault is SLOW:
            engine["timeout"] = 0.2
        config = parse_config(settings(**TEXTS, engine=engine))
        with closing(Ledger.create_or_open(config.privacy.ledger)) as ledger:
            ledger.create_dataset("notes", Budget(100, 1e-3), "record", "add_or_remove_one")
            with pytest.raises(DprayError, match=why) as refused:
                methods.run(config)
            assert ledger.account("notes").spent.epsilon == 0
        assert len(server.requests) == (2 if code == 4 else 1)
    assert refused.value.exit_code == code
    words = "; try again later; nothing was charged; the same command begins again"
    assert str(refused.value).endswith(words if code == 4 else "; nothing was charged")
