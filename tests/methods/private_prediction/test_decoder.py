"""An actor's batches, task after task: the next one begins before the last one is done, and what
comes in its way harms no batch that is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.engines.base import DeviceLost, Following, LockstepGroup, LockstepResult, nothing_follows
from dpray.engines.row_variation import POSITIONS
from dpray.io.public_files import FewShot
from dpray.io.template_file import Template
from dpray.ledger.ledger import Ledger
from dpray.mechanisms.randomness import new_key
from dpray.methods.config import parse_config
from dpray.methods.private_prediction.decoder import BatchDecoder
from dpray.methods.private_prediction.memory import prompt_room
from dpray.methods.private_prediction.prompts import PromptTemplate, encode_private, shown_examples
from dpray.methods.registry import make_plan
from dpray.types import AlreadyPublished, Budget, DprayError, InputError
from dpray.workers.gathering import PartWorker
from dpray.workers.pool_actor import PoolActor

Settings = Callable[..., dict[str, Any]]

COINS = new_key()
TASKS = [[f"0/{number}" for number in range(start, start + 2)] for start in (0, 2, 4)]


class SideBySide:
    """Stands in for an engine with room for three groups, whose texts end in the order in which
    they began; raises `error` in place of the text number `fails_at`."""

    context_length = 512
    shares_public_pass = False

    def __init__(self, error: BaseException | None = None, fails_at: int | None = None) -> None:
        self.error, self.fails_at = error, fails_at
        self.at_once: list[int] = []

    def rows_at_once(self, tokens: int) -> int:
        return 1000

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return (1, 2)

    def truncate(self, text: str, max_tokens: int) -> str:
        return text

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        under_way: list[LockstepGroup] = []
        coming, number = iter(groups), 0
        of_batches = not isinstance(groups, list)  # which is the probe of the engine's rounding
        while True:
            under_way += islice(coming, 3 - len(under_way))
            if not under_way:
                return
            if of_batches and number == self.fails_at and self.error is not None:
                raise self.error
            number += 1
            self.at_once += [len(under_way)] * of_batches
            none = [[0.0]] * POSITIONS
            state = {"t": 10**9, "noisy_threshold": None, "logits": none, "public": none}
            result = LockstepResult(under_way.pop(0).group_id, "a text", (1,), "length", state)
            assert following(result) is None
            yield result

    def close(self) -> None: ...


class Book:
    """Stands in for the ledger, and refuses the task of this number."""

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        self.begun: list[list[str]] = []
        self.failures: list[tuple[str, str]] = []

    def begin(self, key: str, attempt_id: str, batches: list[str]) -> None:
        if len(self.begun) == self.refuses:
            raise DprayError("the ledger is not there")
        self.begun.append(batches)

    def fail(self, key: str, batch: str, attempt_id: str, reason: str) -> None:
        self.failures.append((batch, reason))


Decoder = Callable[[Book, SideBySide], BatchDecoder]


@pytest.fixture
def decoder(settings: Settings) -> Decoder:
    plan = make_plan(parse_config(settings()))
    return lambda book, engine: BatchDecoder(plan, book, "a run", "1", COINS, engine)  # type: ignore[arg-type]


class Moving(SideBySide):
    """Each group's rows move by so much."""

    is_closed = False

    def __init__(
        self, moves: Callable[[LockstepGroup], float], shares_public_pass: bool = False
    ) -> None:
        super().__init__()
        self.moves, self.shares_public_pass = moves, shares_public_pass

    def decode_lockstep(self, groups: Iterable[LockstepGroup], *_: Any) -> Iterator[LockstepResult]:
        for group in groups:
            logits, none = [[self.moves(group)]] * POSITIONS, [[0.0]] * POSITIONS
            state = {"t": 10**9, "noisy_threshold": None, "logits": logits, "public": none}
            yield LockstepResult(group.group_id, "a text", (1,), "length", state)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    "rule",
    [
        {"candidates": "top_k", "k": 50},
        {"public_gate": {"probability": 0.9}},
        {"end_tokens": 8},
    ],
)
def test_public_logits_that_decide_and_move_by_a_bit_are_refused(
    settings: Settings, rule: dict[str, Any]
) -> None:
    """vLLM says that its kernels are invariant to the batch, and has some that are not (Marlin's):
    one private row would take a token into the candidates, or out."""

    def start(shares_public_pass: bool, **method: Any) -> None:
        asked = settings(**{f"method__{key}": value for key, value in method.items()})
        engine: Any = Moving(lambda group: 1e-6 * len(group.private_prompts), shares_public_pass)
        book: Any = Book()
        BatchDecoder(make_plan(parse_config(asked)), book, "a run", "1", COINS, engine)  # type: ignore[arg-type]

    with pytest.raises(InputError, match="no private row may move a bit"):
        start(True, **rule)
    start(False, **rule)
    start(True)


class LostInAnEnding:
    """The real engine, which an interruption ends at the ending of this number."""

    def __init__(self, engine: Any, number: int | None) -> None:
        self.engine, self.number, self.endings = engine, number, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        def watched(result: LockstepResult) -> LockstepGroup | None:
            group = following(result)
            self.endings += group is not None and group.written > 0
            if self.endings == self.number:
                raise KeyboardInterrupt
            return group

        with closing(self.engine.decode_lockstep(groups, watched)) as results:
            yield from results


def test_a_batch_that_is_lost_in_an_ending_is_drawn_again_alike(
    settings: Settings, engine: Any
) -> None:
    """And no token of an ending counts as private."""
    keys = {"end_tokens": 6, "public_temperature": 0.9, "max_records": 48}
    plan = make_plan(parse_config(settings(**{f"method__{key}": x for key, x in keys.items()})))

    def outcomes(number: int | None, tasks: list[list[str]]) -> tuple[dict[str, Any], Book, int]:
        book, found = Book(), LostInAnEnding(engine, number)
        worker: Any = BatchDecoder(plan, book, "a run", "1", COINS, found)  # type: ignore[arg-type]
        done = {}
        with suppress(KeyboardInterrupt):
            for each in worker.work(map(rows, tasks)):
                done[each["batch"]] = each
        return done, book, found.endings

    whole, _, endings = outcomes(None, TASKS)
    assert len(whole) == 6 and endings > 6
    before, book, _ = outcomes(3, TASKS)
    assert len(before) < 6 and book.failures == []
    after, _, _ = outcomes(None, [[name for name in whole if name not in before]])
    assert before | after == whole
    for outcome in whole.values():
        assert outcome["private_tokens"] <= 4 * len(outcome["examples"]) < outcome["tokens"]


def rows(task: list[str]) -> list[dict[str, Any]]:
    """Place-holders: empty batches."""
    return [{"batch": batch, "text": None, "unit": "", "rank": 0} for batch in task]


def test_a_task_begins_when_there_is_room_for_its_first_batch(decoder: Decoder) -> None:
    book = Book()
    outcomes = decoder(book, SideBySide()).work(map(rows, TASKS))
    begun = [(outcome["batch"], len(book.begun)) for outcome in outcomes]
    # With room for three, the second task begins with the first, and the third when two are done.
    assert begun == [("0/0", 2), ("0/1", 2), ("0/2", 3), ("0/3", 3), ("0/4", 3), ("0/5", 3)]
    assert book.begun == TASKS


@pytest.mark.parametrize("ahead", [True, False])
def test_an_engine_is_full_from_slice_to_slice(decoder: Decoder, ahead: bool) -> None:
    """The other way, to let it finish each slice, shows that this test can fail."""
    engine, names = SideBySide(), [f"0/{number}" for number in range(9)]
    actor = PoolActor(lambda: engine)
    actor.load(partial(PartWorker, partial(decoder, Book()), 2), most=2)
    block = pa.Table.from_pylist(rows(names))
    found: list[str] = []

    def until_ready() -> None:
        ready = False
        while not ready:
            answer = actor.more()
            found.extend(str(name) for name, _ in answer.results)
            ready = answer.is_ready

    for number in range(4):
        actor.take(block, number, 4, None)
        until_ready()
        if not ahead:
            actor.finish()
            until_ready()
    actor.finish()
    until_ready()
    assert sorted(found) == names
    assert (engine.at_once == [3] * 7 + [2, 1]) is ahead


def test_an_outcome_is_handed_over_though_the_others_of_its_task_are_not_there() -> None:
    """A batch may take minutes on a CPU, and a task has many."""
    others = Event()

    class Slow:
        worker_id = "slow"

        def work(self, tasks: Iterable[list[Any]]) -> Iterator[Any]:
            for task in tasks:
                for number, row in enumerate(task):
                    if number == 1:
                        others.wait(60)
                    yield {"batch": row["batch"]}

        def close(self) -> None: ...

    actor = PoolActor(lambda: None)
    actor.load(partial(PartWorker, lambda engine: Slow(), 64), most=64, patience=0.1)  # type: ignore[arg-type]
    actor.take(pa.Table.from_pylist(rows(["0/0", "0/1", "0/2"])), 0, 1, None)
    try:
        first = actor.more()
        while not first.results:  # the task was taken
            actor.finish()
            first = actor.more()
    finally:
        others.set()
    assert first.results == [("0/0", {"batch": "0/0"})] and not first.is_idle


def test_two_decoders_of_an_attempt_are_two_starts_in_the_ledger(
    settings: Settings, tmp_path: Path
) -> None:
    """The second one takes over what was lost with the first, which may be alive: it adds to the
    ledger, and begins nothing that is published."""
    plan = make_plan(parse_config(settings()))
    with closing(Ledger.create_or_open(f"sqlite:///{tmp_path}/book.db")) as ledger:
        stated_for = ("record", NEIGHBORING_RELATION)
        ledger.create_dataset("notes", Budget(1.0, 1e-6), *stated_for)
        ledger.reserve("notes", {"run": (DiscreteLaplace(10.0, 1), Budget(0.1, 0.0))}, *stated_for)

        def decoded(task: list[str]) -> list[str]:
            made = BatchDecoder(plan, ledger, "run", "attempt", COINS, SideBySide())  # type: ignore[arg-type]
            return [outcome["batch"] for outcome in made.work([rows(task)])]

        assert decoded(["0/0", "0/1"]) == ["0/0", "0/1"]
        assert decoded(["0/1"]) == ["0/1"]
        assert [unit for unit, _ in ledger.started("run")] == ["0/0", "0/1", "0/1"]
        ledger.publish("run", "attempt", [("0/1", "0" * 64)])
        with pytest.raises(AlreadyPublished):
            decoded(["0/1"])
        assert ledger.counts("run")["starts"] == 3


def test_a_model_whose_rows_move_with_a_long_one_decodes_nothing(decoder: Decoder) -> None:
    engine = Moving(lambda group: float(max(map(len, group.prompts)) > 500))
    with pytest.raises(InputError, match=r"moved by up to 1.0e\+00 .* in float32: all rows"):
        decoder(Book(), engine)
    assert engine.is_closed


def test_what_the_ledger_refuses_to_begin_harms_no_batch_under_way(decoder: Decoder) -> None:
    book = Book(refuses=1)
    outcomes = decoder(book, SideBySide()).work(map(rows, TASKS))
    assert [next(outcomes)["batch"], next(outcomes)["batch"]] == TASKS[0]
    with pytest.raises(DprayError, match="the ledger is not there"):
        next(outcomes)
    assert book.begun == TASKS[:1] and book.failures == []


def test_an_engine_that_fails_loses_what_has_begun_in_all_tasks(decoder: Decoder) -> None:
    book = Book()
    engine = SideBySide(DeviceLost("the GPU is gone"), fails_at=1)
    outcomes = decoder(book, engine).work(map(rows, TASKS))
    assert next(outcomes)["batch"] == "0/0"
    with pytest.raises(DeviceLost, match="the GPU is gone"):
        next(outcomes)
    assert book.begun == TASKS[:2]
    assert book.failures == [], "what has begun may be decoded again"


PANIC = type("PanicException", (BaseException,), {})("Marlowe")
"""Raised by a library in Rust. It is no `Exception`."""


@pytest.mark.parametrize("error", [KeyError("Marlowe"), PANIC], ids=repr)
def test_what_our_own_code_raises_fails_what_has_begun_and_shows_no_text(
    decoder: Decoder, error: BaseException
) -> None:
    book = Book()
    engine = SideBySide(error, fails_at=2)
    outcomes = list(decoder(book, engine).work(map(rows, TASKS)))
    assert [outcome["batch"] for outcome in outcomes if "examples" in outcome] == TASKS[0]
    assert book.failures == [(f"0/{number}", type(error).__name__) for number in (2, 3, 4, 5)]
    assert "Marlowe" not in str(outcomes)


def test_an_interruption_fails_nothing(decoder: Decoder) -> None:
    book = Book()
    with pytest.raises(KeyboardInterrupt):
        list(decoder(book, SideBySide(KeyboardInterrupt(), fails_at=2)).work(map(rows, TASKS)))
    assert book.failures == []


class ByWord(SideBySide):
    """Has a token for each word."""

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return tuple(hash(word) for word in f"{prompt.user} {prompt.prefix}".split())

    def truncate(self, text: str, max_tokens: int) -> str:
        return " ".join(text.split()[:max_tokens])


def likes(few_shot: list[str], sections: int = 1) -> PromptTemplate:
    texts = Template({"user": "Like {examples}{text}", "example": "{example} "})
    return PromptTemplate(texts, few_shot=FewShot({None: few_shot}, 2), sections=sections)


@pytest.mark.parametrize(("room", "shown"), [(30, 2), (22, 2), (21, 1), (12, 1), (11, 0)])
def test_public_examples_leave_half_of_the_room_to_the_private_text(room: int, shown: int) -> None:
    template = likes(["one two three four five", "six seven eight nine ten"])
    engine: Any = ByWord()
    [examples] = shown_examples(engine, template, "", "0/0", room)
    assert len(examples) == shown
    assert examples == template.examples("", "0/0")[:shown]
    tokens = encode_private(engine, template, "word " * 100, "", examples, room)
    assert len(tokens) == room


@pytest.mark.parametrize(("room", "shown"), [(17, 2), (10, 2), (9, 1), (6, 1), (5, 0)])
def test_examples_are_measured_by_the_section_that_a_prompt_shows(room: int, shown: int) -> None:
    """A text of four words in two sections takes two tokens of a prompt, not four."""
    template = likes(["One two. Three four.", "Five six. Seven eight."], sections=2)
    engine: Any = ByWord()
    first, second = shown_examples(engine, template, "", "0/0", room)
    whole = template.examples("", "0/0")[:shown]
    assert [f"{one} {two}" for one, two in zip(first, second, strict=True)] == whole
    longest, left = prompt_room(template, [""], engine, room + 1, 1)
    assert longest == room - left == 1 + 2 * shown
