"""Engines that fail, memory that does not suffice, and texts that stand there a thousand times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import OutOfMemoryError as EndedByRay

from dpray.config.config import Config, EngineConfig
from dpray.engines import row_variation
from dpray.engines.base import (
    HARDWARE_ERRORS,
    DeviceLost,
    Engine,
    EngineError,
    Failed,
    Following,
    GroupLogits,
    LockstepGroup,
    LockstepResult,
    Selected,
    Selection,
    engine_error,
    failure_name,
    nothing_follows,
    select_tokens,
    selector_error,
)
from dpray.engines.finite_rows import highest
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.methods.private_prediction import token
from dpray.methods.private_prediction.decoder import MOST_COPIES, bound_copies
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.step import Group, draw
from dpray.types import DprayError, InputError, Resumable, RunFailed
from dpray.workers.failures import Kind, is_own_failure, kind_of
from dpray.workers.gathering import PLACEHOLDER, batch_texts
from tests.engines.kept import Kept
from tests.faults import driver


def accelerator_error(number: int) -> Exception:
    error = torch.AcceleratorError("CUDA error: Marlowe")
    error.error_code = number
    return error


def low_on_memory() -> Exception:
    return EndedByRay("1 worker(s) were killed due to the node running low on memory: 0/4")


class Faulty(driver.Faulty):
    """The real engine, which raises `errors` one after the other, each when `after` texts of a call
    are finished; counts how often it was loaded and how many rows its groups had."""

    def __init__(self, engine: Engine, errors: Iterable[Exception] = (), after: int = 2) -> None:
        super().__init__(Kept(engine), "")
        self.errors, self.after = list(errors), after
        self.loaded = 0
        self.sizes: list[int] = []

    def build(self, section: EngineConfig, **_: Any) -> Faulty:
        self.loaded += 1
        return self

    def on_group(self, group: LockstepGroup) -> None:
        self.sizes.append(len(group.private_prompts))

    def on_text(self, finished: int) -> None:
        if finished == self.after and self.errors:
            raise self.errors.pop(0)

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        if isinstance(groups, list):  # the device's own test, before any batch
            return self.engine.decode_lockstep(groups, following)
        return super().decode_lockstep(groups, following)


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    """12 batches in tasks of four, a text each."""
    return lambda **changes: parse_config(settings(**({"method__max_records": 12} | changes)))


def run(config: Config, faulty: Faulty) -> dict[str, Any]:
    return methods.run(config, build=faulty.build)


def records(config: Config) -> list[dict[str, Any]]:
    path = Path(config.output.path) / "synthetic.jsonl"
    return [json.loads(line) for line in path.open()]


def test_a_run_that_has_lost_its_configuration_does_not_go_on_with_another(
    config: Callable[..., Config], engine: Engine
) -> None:
    """Batches of two partitions would be released for one charge: a record could be in two."""
    keys = {"runtime__max_attempts": 1, "method__private_tokens": 8}
    made = config(**keys)
    with pytest.raises(Resumable):
        run(made, Faulty(engine, [DeviceLost("the GPU is gone")], after=1))
    kept = Path(made.output.path) / "private" / "config.json"
    before = kept.read_text()
    kept.unlink()
    for public_size in (60, 30):
        with pytest.raises(InputError, match=r"configuration is unchanged: .* is missing"):
            run(config(**keys, data__public_size=public_size), Faulty(engine))
    kept.write_text(before)
    report = run(made, Faulty(engine))
    kept.unlink()
    assert run(made, Faulty(engine)) == report


def test_a_model_whose_rows_move_each_other_is_refused_before_the_charge(
    config: Callable[..., Config],
    engine: Engine,
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = config()
    with monkeypatch.context() as patched:
        patched.setattr(row_variation, "row_variation", lambda *_: 1.0)
        with pytest.raises(InputError, match=r"c / s does not hold.*nothing was charged"):
            run(made, Faulty(engine))
    assert not Path(made.privacy.ledger.removeprefix("sqlite:///")).exists()
    other = copytree(model_folder, tmp_path / "another model")
    run(config(engine__model=str(other)), Faulty(engine))


def test_an_engine_that_raises_once_costs_its_unfinished_batches_a_repetition(
    config: Callable[..., Config], engine: Engine
) -> None:
    faulty = Faulty(engine, [DeviceLost("the GPU is gone")])
    report = run(config(), faulty)
    # Two of the first task's four batches were whole, and are not decoded again.
    assert report["batches"]["published"] == 12 and report["batches"]["repeated"] == 2
    assert report["batches"]["failed"] == 0
    assert faulty.loaded == 2, "the engine that failed is not asked again"


def test_an_engine_whose_test_fails_is_closed_before_the_next_one_is_loaded(
    config: Callable[..., Config], engine: Engine
) -> None:
    """A device holds one engine at a time."""
    held: list[int] = []

    class FailsItsTest(Faulty):
        def build(self, section: EngineConfig, **_: Any) -> Faulty:
            assert not held
            held.append(1)
            return super().build(section)

        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
        ) -> Iterator[LockstepResult]:
            if self.errors:
                raise self.errors.pop(0)
            return super().decode_lockstep(groups, following)

        def close(self) -> None:
            held.pop()

    faulty = FailsItsTest(engine, [DeviceLost("the GPU is gone")])
    with pytest.raises(InputError, match=r"the GPU is gone; nothing was charged"):
        run(config(), faulty)
    assert not held
    assert run(config(), faulty)["batches"]["published"] == 12 and not held


def test_want_of_memory_is_final(config: Callable[..., Config], engine: Engine) -> None:
    """`test_table` has the other errors that are not on the short list."""
    faulty = Faulty(engine, [MemoryError()])
    with pytest.raises(DprayError, match=r"failed with OutOfMemory .*never repeated") as ended:
        run(config(), faulty)
    assert ended.value.exit_code == 1
    with pytest.raises(DprayError, match="never repeated"):
        run(config(), faulty)
    assert not (Path(config().output.path) / "synthetic.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (RuntimeError("CUDA error: out of memory"), "OutOfMemory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "OutOfMemory"),
        (OSError(12, "Cannot allocate memory"), "OutOfMemory"),
        (ValueError("cannot encode 'the ward ran out of memory aids'"), "ValueError"),
        (accelerator_error(710), "AcceleratorError"),
    ],
)
def test_what_a_text_says_is_no_want_of_memory(error: Exception, name: str) -> None:
    """An error may quote a prompt, whose words must not decide whether its batch is repeated."""
    assert failure_name(error) == name
    assert kind_of(engine_error("in a step", error)) is Kind.ENGINE
    assert kind_of(selector_error(name)) is Kind.ENGINE


@pytest.mark.parametrize("number", HARDWARE_ERRORS)
def test_an_error_of_the_hardware_is_told_by_its_number(number: int) -> None:
    error = RuntimeError("a wrapper")
    error.__cause__ = accelerator_error(number)
    for found in (engine_error("in a step", error), selector_error(failure_name(error))):
        assert kind_of(found) is Kind.DEVICE_LOST


@given(st.text(), st.sampled_from([IndexError, RuntimeError, ValueError, OSError, KeyError]))
def test_no_words_of_an_error_have_a_batch_repeated(words: str, kind: type[Exception]) -> None:
    for said in (words, f"{words} uncorrectable ECC error; actor died; CUDA error 214"):
        assert is_own_failure(engine_error("in a step", kind(said)))
        assert is_own_failure(selector_error(failure_name(kind(said))))


def test_a_draw_that_cannot_be_written_is_not_drawn_again(
    config: Callable[..., Config], engine: Engine
) -> None:
    """A lone surrogate is in no file: the error is the draw's."""

    class Odd(Faulty):
        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
        ) -> Iterator[LockstepResult]:
            def odd(result: LockstepResult) -> LockstepGroup | None:
                return following(replace(result, text="\udc80"))

            return super().decode_lockstep(groups, odd)

    made = config()
    for match in ("the run stopped: UnicodeEncodeError; .* never repeated", "never repeated"):
        with pytest.raises(RunFailed, match=match) as ended:
            run(made, Odd(engine))
        assert ended.value.exit_code == 1


@pytest.mark.parametrize("batches", ["disjoint", "poisson"])
def test_what_is_drawn_again_is_what_was_drawn(
    config: Callable[..., Config], engine: Engine, batches: str
) -> None:
    """Texts that are drawn and lost, with a machine that was full: had they other coins the next
    time, long ones would be lost more often than others. In two commands, each of two attempts."""

    class Drawn(Faulty):
        """Loses the second text that it has drawn in each of the first three attempts."""

        def __init__(self) -> None:
            super().__init__(engine, [low_on_memory() for _ in range(3)])
            self.texts: list[tuple[str, str]] = []

        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
        ) -> Iterator[LockstepResult]:
            def noted(result: LockstepResult) -> LockstepGroup | None:
                self.texts += [(result.group_id, result.text)] * (not isinstance(groups, list))
                return following(result)

            return super().decode_lockstep(groups, noted)

        def before_text(self, number: int) -> None:
            if number == 2 and self.errors:
                raise self.errors.pop(0)

    made, drawn = config(method__batches=batches, runtime__max_attempts=2), Drawn()
    with pytest.raises(Resumable, match=r"^Ray ended a process.* low on memory \(2 times\)"):
        run(made, drawn)
    counted = run(made, drawn)["batches"]
    assert counted["failed"] == 0 < counted["repeated"]
    texts = dict(drawn.texts)
    assert len(drawn.texts) > len(texts), "some were drawn more than once"
    assert set(drawn.texts) == set(texts.items()), "and each time they were the same"


class SideBySide(driver.Words):
    """Draws the tokens of up to three groups in one call of the device, which fails at the calls
    that are in `errors`. `drawn` has the token of each coin, `lost` the groups of failed calls."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors, self.calls = errors, 0
        self.drawn: list[tuple[int, int]] = []
        self.lost: list[int] = []

    def draw(self, mechanism: PrivateToken, groups: list[Group]) -> torch.Tensor:
        self.calls += 1
        tokens = draw(mechanism, groups)
        self.drawn += zip(
            (each.coins.uniform for each in groups), tokens[:, 0].tolist(), strict=True
        )
        if (error := self.errors.pop(self.calls, None)) is not None:
            self.lost.append(len(groups))
            raise error
        return tokens

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        waiting, running = iter(groups), []
        while True:
            running += [_Text(group) for group in islice(waiting, 3 - len(running))]
            if not running:
                return
            ends = select_tokens([text.selection() for text in running])
            for text, end in zip(running, ends, strict=True):
                text.note(end)
            for text in [each for each in running if each.result is not None]:
                running.remove(text)
                if (after := following(text.result)) is not None:
                    running.append(_Text(after))
                yield text.result


class _Text:
    def __init__(self, group: LockstepGroup) -> None:
        self.group, self.selector = group, group.selector.build()
        self.tokens: list[int] = []
        self.result: Any = None

    def selection(self) -> Selection:
        rows = [driver.logits(prompt, self.tokens) for prompt in self.group.prompts]
        logits_SV = torch.from_numpy(np.array(rows, dtype=np.float32))
        return self.selector.select(
            GroupLogits(logits_SV[:-1], highest(logits_SV[:-1]), logits_SV[-1])
        )

    def note(self, end: Selected | Failed) -> None:
        if isinstance(end, Failed):
            raise selector_error(failure_name(end.error))
        self.tokens += [] if end.token is None else [end.token]
        if end.token is None or len(self.tokens) == self.group.max_tokens:
            reason: Any = "exhausted" if end.token is None else "length"
            text, state = driver.text_of(self.tokens), self.selector.state()
            name, tokens = self.group.group_id, tuple(self.tokens)
            self.result = LockstepResult(name, text, tokens, reason, state)


@pytest.mark.parametrize("number", [214, 220, 710])
def test_an_error_of_the_device_in_a_step_of_several_batches_draws_nothing_twice(
    config: Callable[..., Config], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches of the step are lost, and the one that has begun with them. If the device is
    gone, they are decoded again, by the next attempt and the next command, from the same coins and
    for no further charge. After any other error, of which a private row may be the reason, none of
    them is."""
    made = config(runtime__max_attempts=2, method__candidates="all")
    device = SideBySide({call: accelerator_error(number) for call in (3, 6, 9)})
    monkeypatch.setattr(token, "_draw_by", lru_cache(lambda m: partial(device.draw, m)))

    def entries() -> Any:
        with closing(Ledger.open(made.privacy.ledger)) as ledger:
            [shown] = ledger.show()["datasets"]
        return [(entry["key"], entry["spent"]) for entry in shown["entries"]]

    faulty: Any = Faulty(device)  # type: ignore[arg-type]
    if number != 710:
        with pytest.raises(Resumable, match=r"^the device failed \(DeviceLost\) \(2 times\)"):
            run(made, faulty)
        charged = entries()
        counted = run(made, faulty)["batches"]
        assert (counted["published"], counted["failed"]) == (12, 0) and counted["repeated"] > 3
        assert max(device.lost) == 3 and len(device.lost) == 3
        assert len(device.drawn) > len(dict(device.drawn)), "some were drawn more than once"
        assert set(device.drawn) == set(dict(device.drawn).items()), "and were the same"
    else:
        for _ in range(2):
            with pytest.raises(RunFailed, match=r"EngineError \(4 in all\).*never repeated"):
                run(made, faulty)
        charged = entries()
        assert device.lost == [3] and device.calls == 3
    assert entries() == charged and len(charged) == 1


def test_an_engine_that_cannot_be_loaded_costs_nothing(
    config: Callable[..., Config], engine: Engine, tmp_path: Path
) -> None:
    def broken(section: EngineConfig, **_: Any) -> Engine:
        raise EngineError("vLLM cannot load m: no such option")

    with pytest.raises(InputError, match=r"^engine: vLLM cannot load m: .*nothing was charged$"):
        methods.run(config(), build=broken)
    assert not (tmp_path / "ledger.db").exists()
    faulty = Faulty(engine)
    assert run(config(), faulty)["records"] > 0
    assert faulty.loaded == 1, "the engine that was tried is the one that is used"


def test_copies_of_one_text_beyond_a_public_number_are_left_out(
    config: Callable[..., Config], engine: Engine, records_file: Path
) -> None:
    with open(records_file, "a") as file:
        file.writelines(['{"text": "thanks", "label": "a"}\n'] * 2000)
    faulty = Faulty(engine)
    report = run(config(data__label=None, data__labels=[]), faulty)
    assert sum(faulty.sizes) == 60 + MOST_COPIES
    assert "4 are used at most" in report["sampling"]["copies"]


def row(number: int) -> dict[str, Any]:
    return {"batch": f"0/{number % 3}", "text": f"text {number}", "unit": str(number), "rank": 0}


PLACES = [PLACEHOLDER | {"batch": f"0/{batch}"} for batch in range(3)]


@given(st.lists(st.integers(0, 2)), st.integers(0, 2), st.randoms())
def test_a_record_more_moves_the_rows_that_are_used_by_one(
    numbers: list[int], another: int, random: Any
) -> None:
    def used(numbers: list[int]) -> dict[str, list[str]]:
        rows = [*map(row, numbers), *PLACES]
        random.shuffle(rows)
        grouped = batch_texts(bound_copies(rows))
        return {batch: sorted(texts) for batch, texts in grouped.items()}

    before, after = used(numbers), used([*numbers, another])
    added = numbers.count(another) < MOST_COPIES
    expected = before | {
        (name := f"0/{another % 3}"): sorted(before[name] + [f"text {another}"] * added)
    }
    assert after == expected
    assert all(texts.count(text) <= MOST_COPIES for texts in after.values() for text in texts)


def test_batches_that_give_no_record_are_made_up_for_by_the_next_ones(
    config: Callable[..., Config], engine: Engine
) -> None:
    """Every other text comes out empty; cut off in its midst, the run releases as many."""

    class Mute(Faulty):
        def decode_lockstep(
            self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
        ) -> Iterator[LockstepResult]:
            def muted(result: LockstepResult) -> LockstepGroup | None:
                if "/" not in result.group_id:  # a group of `row_variation`
                    return following(result)
                number = int(result.group_id.split("/")[-1])
                text = "" if number % 2 else f"text of {result.group_id}"
                return following(replace(result, text=text, finish_reason="stop"))

            return super().decode_lockstep(groups, muted)

    made = config(method__max_records=5, runtime__max_attempts=1, runtime__batches_per_task=2)
    mute = Mute(engine, [DeviceLost("the GPU is gone")], after=1)
    with pytest.raises(Resumable, match="the GPU is gone"):
        run(made, mute)
    report = run(made, mute)
    expected = ["0/0", "1/0", "0/2", "1/2", "0/4"]
    assert [record["batch"] for record in records(made)] == expected
    assert report["records"] == 5 and 9 <= report["batches"]["published"] <= 12
