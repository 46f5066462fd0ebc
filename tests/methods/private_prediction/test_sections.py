"""Documents of several sections: how a text is cut, that a record moves one row of every section's
prompts, what a document costs, and real runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpray
from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepResult
from dpray.engines.text import TextCodec
from dpray.engines.transformers import TransformersEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.algorithm import Batch, BatchState
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.release import records_of
from dpray.methods.private_prediction.sections import sections_of
from dpray.methods.registry import make_plan, run
from dpray.types import InputError

Settings = Callable[..., dict[str, Any]]
Plans = Callable[..., PrivatePredictionPlan]
Decoders = Callable[..., BatchDecoder]

DEMO = Path(dpray.__file__).parent / "demo" / "model"

HEADINGS = ("COMPLAINT", "## History", "Findings:", "PLAN: rest", "# Notes")


def note(number: int, headings: Sequence[str] = HEADINGS) -> str:
    rng = random.Random(number)
    words = ("fell", "left arm", "no pain", "walks", "sleeps well")
    return "\n".join(
        f"{heading}\n{' '.join(rng.choices(words, k=rng.randint(2, 9)))}." for heading in headings
    )


def test_a_note_is_cut_at_its_headings() -> None:
    for number in range(20):
        text = note(number)
        cut = sections_of(text, 5)
        assert tuple(each.splitlines()[0] for each in cut) == HEADINGS
        assert "\n".join(cut) == text
        assert sections_of(f"A title\n\n{text}", 5)[0].endswith(cut[0])
    # Eight headed parts are three sections of about the same length, each from a heading on.
    long = "\n".join(f"PART {n}\n{'word ' * 20}end." for n in range(8))
    three = sections_of(long, 3)
    assert all(each.startswith("PART") for each in three)
    assert max(map(len, three)) < 2 * min(map(len, three))


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("A\n\nB. C.\n\nD", ["A", "B. C.", "D"]),
        ("One is here. Two is here. Three.", ["One is here.", "Two is here.", "Three."]),
        ("一个。两个。三个。", ["一个。", "两个。", "三个。"]),
        ("Only one. And two.", ["Only one.", "And two.", "And two."]),
        ("", ["", "", ""]),
    ],
)
def test_a_text_without_headings_is_cut_at_blank_lines_or_sentences(
    text: str, sections: list[str]
) -> None:
    assert sections_of(text, 3) == sections


@given(st.text(alphabet="aB.#: \n。\r\u2028\ud800", max_size=60), st.integers(1, 6))
def test_any_text_has_as_many_sections_as_the_public_number_says(text: str, number: int) -> None:
    cut = sections_of(text, number)
    assert len(cut) == number
    words = "".join(text.split())
    joined = "".join("".join(each.split()) for each in cut)
    assert joined.startswith(words)
    assert len(set(cut)) == number or joined.removeprefix(words) in ("", *_repeats(cut))


def _repeats(cut: list[str]) -> list[str]:
    last = "".join(cut[-1].split())
    return [last * times for times in range(len(cut))]


# Rows


@pytest.fixture(scope="module")
def codec(model_folder: str) -> TextCodec:
    return TextCodec(model_folder, None)


@pytest.fixture
def decoder_of(settings: Settings, codec: TextCodec) -> Decoders:
    """Make what encodes the batches of a plan, without an engine that decodes."""

    def make(sections: int, **changes: Any) -> BatchDecoder:
        changes = {"method__max_tokens": 6, "method__max_prompt_tokens": 12} | changes
        plan = make_plan(parse_config(settings(method__sections=sections, **changes)))
        made = object.__new__(BatchDecoder)
        made.plan, made.engine, made.key, made._coins = plan, codec, "run", "5a" * 32  # type: ignore[assignment]
        made._room = codec.context_length - plan.settings.document_tokens
        return made

    return make


Encoded = Callable[[BatchDecoder, list[str]], Batch]


def encoded(decoder: BatchDecoder, texts: list[str]) -> Batch:
    return decoder._encoded("0/0", texts)


def as_many_sections_as_a_record(decoder: BatchDecoder, texts: list[str]) -> Batch:
    """Let the record with most lines say how many sections all records have."""
    settings = decoder.plan.settings
    most = max((len(text.splitlines()) for text in texts), default=1)
    number = max(most, settings.sections)
    changed = settings.model_copy(update={"sections": number})
    template = replace(decoder.plan.template, sections=number)
    plan = replace(decoder.plan, settings=changed, template=template)
    other = object.__new__(BatchDecoder)
    other.__dict__ |= vars(decoder) | {"plan": plan}
    return other._encoded("0/0", texts)


def in_another_order(decoder: BatchDecoder, texts: list[str]) -> Batch:
    """Give a later section's prompts of one record to another record's place, by all lengths."""
    right = decoder._encoded("0/0", texts)

    def following(written: Any) -> Any:
        assert right.following is not None
        private, public = right.following(written)
        turn = sum(map(len, texts)) % max(1, len(private))
        return private[turn:] + private[:turn], public

    return replace(right, following=following)


def with_what_the_others_say(decoder: BatchDecoder, texts: list[str]) -> Batch:
    """Show the longest record in all prompts of the next section."""
    right = decoder._encoded("0/0", texts)

    def following(written: list[LockstepResult]) -> Any:
        assert right.following is not None
        return right.following([replace(written[0], text=max(texts, key=len)), *written[1:]])

    return replace(right, following=following)


def one_row_moves(encode: Encoded, decoder: BatchDecoder, texts: list[str], place: int) -> bool:
    """Return whether two batches, without and with the record at a place, differ in each section by
    this record's row only, in this place."""
    without = encode(decoder, texts[:place] + texts[place + 1 :])
    whole, written = encode(decoder, texts), []
    for number in range(decoder.plan.settings.sections):
        mine, others = (
            (each.private_prompts, each.public_prompt) if not written else each.following(written)  # type: ignore[misc]
            for each in (whole, without)
        )
        private, public = mine
        if (private[:place] + private[place + 1 :], public) != others:
            return False
        state = {"t": 0, "noisy_threshold": None}
        text = f"What is written of it, {number}."
        written.append(LockstepResult("0/0", text, (1,) * 6, "length", state))
    return len(whole.private_prompts) == len(texts)


def test_a_record_moves_its_own_row_of_every_section(decoder_of: Decoders) -> None:
    rng, decoder = random.Random(1), decoder_of(3)
    odd = ["", "\n\n", "one", "</s> <s>", "x" * 3000, "A.\n\nB.\n\nC.\n\nD.", note(1), "。" * 90]
    for _ in range(12):
        texts = rng.sample([*odd, *map(note, range(4))], 6)
        assert one_row_moves(encoded, decoder, texts, rng.randrange(6))


@pytest.mark.parametrize(
    "fault", [as_many_sections_as_a_record, in_another_order, with_what_the_others_say]
)
def test_a_planted_fault_moves_other_rows(decoder_of: Decoders, fault: Encoded) -> None:
    texts = ["A. B.", "C. D. E. F. G. H.", note(3, HEADINGS * 2), "I. J."]
    assert one_row_moves(encoded, decoder_of(3), texts, 2)
    assert not one_row_moves(fault, decoder_of(3), texts, 2)


def test_every_section_has_its_rows_and_shows_what_is_written(
    decoder_of: Decoders, codec: TextCodec
) -> None:
    decoder = decoder_of(5, method__max_tokens=20, method__max_prompt_tokens=40)
    batch = decoder._encoded("0/0", [note(1), note(2)])
    written: list[Any] = []
    for number, word in enumerate(("complaint", "history", "findings", "plan", "notes")):
        private, public = batch.following(written)
        shown = [codec.tokenizer.decode(row).lower() for row in (*private, public)]
        assert all(word in row for row in shown[:2]) and word not in shown[2]
        assert all(f"cough {n}" in row for row in shown for n in range(number))
        written.append(SimpleNamespace(text=f" cough {number}. Cut", finish_reason="length"))
    assert batch.following(())[0] == batch.private_prompts


def test_what_is_written_is_cut_to_its_room_and_a_private_text_keeps_its_own(
    decoder_of: Decoders, codec: TextCodec
) -> None:
    """A text may have more tokens when it is read than were drawn for it."""
    decoder = decoder_of(3, method__max_tokens=40, method__max_prompt_tokens=20)
    batch = decoder._encoded("0/0", [note(1)])
    for text in ("word " * 400, "qzx" * 300, "。\n" * 300):
        written: list[Any] = [SimpleNamespace(text=text, finish_reason="stop")] * 2
        private, public = batch.following(written)
        memory = decoder.plan.memory
        assert memory is not None
        for row in (*private, public):
            assert len(row) + 40 <= min(memory.row_tokens, codec.context_length)


# Cost and documents


@pytest.fixture
def plan(settings: Settings) -> Plans:
    return lambda **changes: make_plan(parse_config(settings(**changes)))


def test_sections_cost_as_much_as_their_tokens_in_one_text(plan: Plans) -> None:
    for kind in ({"batches": "poisson", "texts": 6, "max_records": None}, {"batches": "disjoint"}):
        asked = {f"method__{key}": value for key, value in kind.items()}
        one = plan(method__max_tokens=12, **asked)
        three = plan(method__max_tokens=4, method__sections=3, **asked)
        assert three.dp_event == one.dp_event and three.cost.epsilon == one.cost.epsilon
        assert three.private_tokens == one.private_tokens
        assert three.expected_records == one.expected_records
        assert three.whole_texts == one.whole_texts
    short = plan(method__max_tokens=4, method__batches="poisson", method__texts=6,
                 method__max_records=None)  # fmt: skip
    assert short.private_tokens == 4 and three.lines()["sections"].startswith("3 of a text")


def test_a_document_that_is_not_whole_at_r_private_tokens_is_dropped(plan: Plans) -> None:
    """The tokens of all sections count: four of 4 tokens, and 2 of the fifth, are r = 18."""
    made = plan(method__sections=2, method__max_tokens=4, method__private_tokens=18,
                method__max_records=None)  # fmt: skip
    method, shown = made.method, []

    def following(written: Sequence[LockstepResult]) -> Any:
        shown.append([x.text for x in written])
        return ((len(shown), 1),), (9,)

    state = BatchState(Batch("0/0", ((1, 2),), (3,), new_key(), following))
    for number, t in enumerate((4, 8, 12, 16, 18)):
        assert method.goes_on(state)
        group = method.next_text(state)
        assert group.private_prompts == (((1, 2),) if number % 2 == 0 else ((len(shown), 1),))
        assert group.selector.arguments["t"] == (0, 4, 8, 12, 16)[number]
        reason: Any = "exhausted" if t == 18 else "length"
        result = {"t": t, "noisy_threshold": None}
        state.add(LockstepResult("0/0", f"s{number}", (7,) * 4, reason, result))
    assert not method.goes_on(state)
    assert shown == [["s0"], ["s2"]]
    assert [x.text for x in state.X] == ["s0", "s1", "s2", "s3"]
    state.X += state.X[:1]  # r may be reached where a section ends, too
    assert [x.text for x in method.document(state)] == ["s0"]


def test_a_record_is_made_of_all_sections_of_a_document(plan: Plans) -> None:
    made = plan(method__sections=2, method__max_tokens=4)
    examples = [["a. b", "length", 4], [" c", "stop", 2], ["", "stop", 1], ["d ", "stop", 3]]
    found = records_of(made, {"batch": "0/0", "examples": examples})
    assert [(each["text"], each["tokens"], each["finish_reason"]) for each in found] == [
        ("a.\n\nc", 6, "length"), ("d", 4, "stop"),
    ]  # fmt: skip


def test_what_sections_cannot_have_is_refused_with_the_key(plan: Plans, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sections: a text with method\.schema"):
        plan(method__sections=2, method__schema={"type": "object"})
    own = tmp_path / "own.yaml"
    own.write_text("user: 'Like {text}'\n")
    with pytest.raises(InputError, match=r"^method\.template: .*\{before\}.*method\.sections"):
        plan(method__sections=2, method__template=str(own))
    with pytest.raises(InputError, match=r"^method\.sections times method\.max_tokens: 300"):
        plan(method__sections=3, method__max_tokens=100)


# Real runs


GATED = {"batch_size": 4, "clip": "dclip", "candidates": "top_k_plus", "k": 50,
         "sparse_vector": {"threshold": 0.3, "noise": 0.2}}  # fmt: skip


@pytest.mark.parametrize("others", [{"sections": 3}, GATED], ids=["sections", "gated"])
def test_a_batch_that_is_drawn_again_gives_the_same_texts(
    settings: Settings, engine: Any, model_folder: str, one_thread: None, others: dict[str, Any]
) -> None:
    """In any order of its records, in parts, and next to other batches."""
    asked = {"max_tokens": 4, "max_prompt_tokens": 12, "private_tokens": 18, "max_records": None}
    changes = {f"method__{key}": value for key, value in (asked | others).items()}
    made = make_plan(parse_config(settings(**changes)))
    texts = [note(number) for number in range(7)]

    def drawn(engine: Any, texts: list[str], beside: int = 0) -> tuple[Any, int]:
        book: Any = SimpleNamespace(begin=lambda *_: None)
        decoder = BatchDecoder(made, book, "run", "1", "5a" * 32, engine)
        rows: Any = [
            {"batch": f"0/{number}", "text": text, "unit": text}
            for number in range(beside, -1, -1)
            for text in (None, *texts[number:])
        ]
        found = {outcome["batch"]: outcome for outcome in decoder.work([rows])}
        return found["0/0"]["examples"], found["0/0"]["private_tokens"]

    found, private = drawn(engine, texts)
    assert len(found) and len(found) % made.settings.sections == 0 and private == 18
    assert drawn(engine, texts, beside=3) == (found, private)
    section = EngineConfig(model=model_folder, kv_cache_gib=0.0004)
    with closing(TransformersEngine(section, max_rows=4)) as small:
        assert drawn(small, random.Random(1).sample(texts, 7)) == (found, private)
    assert drawn(engine, texts[1:])[0] != found


PROBLEMS = ("heart", "skin", "chest")


def test_notes_of_several_sections_come_out_as_documents_of_as_many(
    settings: Settings, tmp_path: Path, records_file: Path
) -> None:
    """Each section is about what that section of the records is about, in the same order."""
    lines = (DEMO.parent / "data" / "private.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    of = [[text for text in texts if f"{name} problem" in text] for name in PROBLEMS]
    with open(records_file, "w") as file:
        for visits in islice(zip(*of, strict=False), 30):
            parts = (f"VISIT {n}: {text}" for n, text in enumerate(visits))
            file.write(json.dumps({"text": "\n".join(parts)}) + "\n")
    data = {"path": str(records_file), "public_size": 15}
    asked = settings(
        data=data, engine__model=str(DEMO), engine__max_model_len=384, privacy__epsilon=1e6,
        method__clip="dclip", method__clip_bound=20.0, method__temperature=0.1,
        method__sections=3, method__max_tokens=20, method__max_prompt_tokens=80,
        method__max_records=3,
    )  # fmt: skip
    run(parse_config(asked))
    released = (tmp_path / "out" / "synthetic.jsonl").read_text().splitlines()
    documents = [json.loads(line)["text"].split("\n\n") for line in released]
    assert [len(sections) for sections in documents] == [3] * 3
    right = sum(
        f"{name} problem" in text
        for sections in documents
        for name, text in zip(PROBLEMS, sections, strict=True)
    )
    assert right >= 7  # of 9: the packaged model is small


@pytest.mark.parametrize("batches", ["disjoint", "poisson"])
def test_a_plan_in_which_no_document_can_be_whole_is_refused(plan: Plans, batches: str) -> None:
    keys: dict[str, Any] = {"method__sections": 5, "method__batches": batches}
    with pytest.raises(InputError, match=r"^method\.sections: each of 5 takes a private token"):
        plan(**keys, method__private_tokens=3)


UNSPACED = "".join(chr(0x4E00 + place) for place in range(9_000))
WORDS = " ".join(f"word{place}" for place in range(2_000))


@pytest.mark.parametrize(
    "text", ["# a\n# b\n# c\n# d\n# e\n" + WORDS.replace("9 ", "9. "), UNSPACED, WORDS]
)
def test_a_long_text_is_cut_evenly_also_without_good_headings(text: str) -> None:
    """A section of nearly the whole text would hardly be read."""
    sections = sections_of(text, 5)
    assert len(sections) == len({*sections}) == 5
    assert max(map(len, sections)) <= 2 * len(text) / 5
