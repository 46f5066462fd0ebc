"""A run's finished calls: each is kept and asked once, whatever ends the process, by an engine
that counts and fails and by Aug-PE over HTTP."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import Completion, EngineError, Prompt, Sampling
from dpray.engines.openai import OpenAIEngine
from dpray.engines.requests import MOST_EMPTY, Request
from dpray.mechanisms.votes import VoteHistogram
from dpray.methods.aug_pe.algorithm import AugPe, AugPeRun, Checkpoint, Population
from dpray.methods.aug_pe.prompts import load_variation_prompts
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.runs.call_cache import Call, CallCache, ask_cached, digest
from dpray.types import DprayError, Resumable
from tests.engines.api_server import Server, chat, running_server


class CountingEngine:
    """Never says the same twice; fails after `left` calls, in an order of its own."""

    def __init__(self, left: int = 10**9) -> None:
        self.left = left
        self.asked: list[str] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[Sampling],
        on_completion: Callable[[int, Completion], None],
    ) -> list[Completion]:
        made: dict[int, Completion] = {}
        for i in reversed(range(len(prompts))):
            if self.left == 0:
                raise EngineError("the endpoint is gone")
            self.left -= 1
            self.asked.append(prompts[i].user)
            text = "" if "empty" in prompts[i].user else f"{prompts[i].user} {len(self.asked)}"
            made[i] = Completion(text, 3, sampling[i].max_tokens)
            on_completion(i, made[i])
        return [made[i] for i in range(len(prompts))]


def requests(count: int, start: int = 0) -> list[Request]:
    return [
        Request(f"random-1-/{i}/0", Prompt(f"prompt {i}", "Text:"), Sampling(i + 1))
        for i in range(start, start + count)
    ]


def ask(engine: Any, path: Path, *options: Any) -> Any:
    cache = CallCache(path)
    return lambda requests: ask_cached(engine, cache, requests, *options)


def test_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    engine = CountingEngine()
    cached = ask(engine, tmp_path / "calls.jsonl")
    first = cached(requests(4))
    assert [text.rpartition(" ")[0] for text in first] == [f"prompt {i}" for i in range(4)]
    assert cached(requests(6))[:4] == first
    assert sorted(engine.asked) == [f"prompt {i}" for i in range(6)]
    assert cached(requests(6)[::-1])[2:] == first[::-1]
    assert len(engine.asked) == 6 and cached([]) == []
    totals = CallCache(tmp_path / "calls.jsonl").totals()
    assert tuple(totals.values()) == (6, 18, sum(range(1, 7)))


def test_what_was_answered_before_the_engine_failed_is_not_asked_again(tmp_path: Path) -> None:
    failing, engine = CountingEngine(left=3), CountingEngine()
    with pytest.raises(EngineError, match="the endpoint is gone"):
        ask(failing, tmp_path / "calls.jsonl")(requests(7))
    texts = ask(engine, tmp_path / "calls.jsonl")(requests(7))
    assert sorted(failing.asked + engine.asked) == [f"prompt {i}" for i in range(7)]
    assert texts[4:] == ["prompt 4 3", "prompt 5 2", "prompt 6 1"]


def test_empty_answers_are_kept_too(tmp_path: Path) -> None:
    empty = [Request("a/0", Prompt("empty"), Sampling(5))]
    engine = CountingEngine()
    cached = ask(engine, tmp_path / "calls.jsonl")
    assert cached(empty) == [""] == cached(empty)
    assert len(engine.asked) == 1


def test_empty_answers_without_an_end_stop_and_are_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    texts = [Request(f"a/{i}", Prompt(f"a {i}"), Sampling(5)) for i in range(2)]
    empty = [Request(f"b/{i}", Prompt(f"empty {i}"), Sampling(5)) for i in range(MOST_EMPTY)]
    few = empty[: MOST_EMPTY - 1]
    engine = CountingEngine()
    ask(engine, path)([*few, texts[0]])  # the engine answers the last request first
    with pytest.raises(Resumable, match=r"20 empty answers in a row"):
        ask(engine, path)([*empty, texts[1]])
    kept = CallCache(path).calls
    assert sorted(call.text != "" for call in kept.values()) == [True, True]
    asked = len(engine.asked)
    ask(engine, path)([*texts, *few])
    assert len(engine.asked) == asked + len(few)


def test_empty_answers_that_finish_first_are_not_in_a_row(tmp_path: Path) -> None:
    """A local model decodes many prompts side by side, and those without a text end at once."""
    requests = [
        Request(f"{i}", Prompt(f"{'empty' if i % 4 else 'a text'} {i}"), Sampling(5))
        for i in range(2 * MOST_EMPTY)
    ]

    class EmptyFirst(CountingEngine):
        def generate(self, prompts: Any, samplings: Any, on_completion: Any) -> Any:
            finished: dict[int, Completion] = {}
            super().generate(prompts, samplings, finished.__setitem__)
            for place, done in sorted(finished.items(), key=lambda each: bool(each[1].text)):
                on_completion(place, done)

    texts = ask(EmptyFirst(), tmp_path / "calls.jsonl")(requests)
    assert sum(map(bool, texts)) == MOST_EMPTY / 2


def test_empty_answers_before_a_text_are_kept(tmp_path: Path) -> None:
    cache = CallCache(tmp_path / "calls.jsonl")
    for number in range(MOST_EMPTY - 1):
        cache.put(Call(str(number), "", 1, 0))
    cache.put(Call("text", "a text", 1, 1))
    cache.check_texts()
    assert len(CallCache(tmp_path / "calls.jsonl").calls) == MOST_EMPTY


def test_calls_without_any_text_are_an_error(tmp_path: Path) -> None:
    cache = CallCache(tmp_path / "calls.jsonl")
    cache.check_texts()
    cache.put(Call("a", "", 1, 0), "content_filter")
    with pytest.raises(Resumable, match=r"1 empty answers in a row \(finish_reason content_filter"):
        cache.check_texts()


def test_another_request_under_the_same_id_is_asked_by_itself(tmp_path: Path) -> None:
    engine = CountingEngine()
    cached = ask(engine, tmp_path / "calls.jsonl")
    (request,) = requests(1)
    first = cached([request])
    others = (
        replace(request, prompt=Prompt("prompt 1", "Text:")),
        replace(request, prompt=Prompt("prompt 0", "")),
        replace(request, sampling=Sampling(9)),
        replace(request, request_id="b"),
    )
    assert len({digest(each) for each in (request, *others)}) == 5
    assert len({*first, *(text for other in others for text in cached([other]))}) == 5
    assert cached([request]) == first
    with pytest.raises(ValueError, match="same id"):
        cached([request, request])
    assert len(engine.asked) == 5


def test_a_call_that_was_put_is_there_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    cache = CallCache(path)
    assert not cache.calls and tuple(cache.totals().values()) == (0, 0, 0)
    made = [Call("b", "", 7, 0), Call("a", "text\x00 ü\n", 5, 2)]  # the empty one waits
    for call in (*made, Call("a", "other words", 9, 9)):
        cache.put(call)
    with open(path, "ab") as file:
        file.write(b'["c", "a write that was cut')
    for again in (CallCache(path), CallCache(path)):
        assert list(again.calls.values()) == made
        assert tuple(again.totals().values()) == (2, 12, 2)
    again.put(Call("d", "more", 1, 1))  # behind whole lines only
    assert [*CallCache(path).calls] == ["b", "a", "d"]
    assert path.stat().st_mode & 0o077 == 0


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A part of a line that another process cuts off is never written later."""

    class Full(FileIO):
        is_full = True

        def write(self, data: Any) -> int:
            if len(data) < 3 and self.is_full:
                raise OSError(errno.ENOSPC, "full")
            return super().write(data[: max(1, len(data) // 2)])

    path = tmp_path / "calls.jsonl"
    cache = CallCache(path)
    cache.put(Call("a", "one", 1, 1))
    cache._file = Full(path, "ab+")
    with pytest.raises(OSError, match="full"):
        cache.put(Call("b", "two", 1, 1))
    again = CallCache(path)
    assert [*again.calls] == ["a"]
    again.put(Call("c", "three", 1, 1))
    cache._file.is_full = False
    cache.put(Call("d", "four", 1, 1))
    cache.close()
    assert [*CallCache(path).calls] == ["a", "c", "b", "d"]


def test_many_threads_share_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    cache = CallCache(path)
    calls = [Call(str(i % 500), "text " * 50, 1, 2) for i in range(1000)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cache.put, calls))
    assert tuple(CallCache(path).totals().values()) == (500, 500, 1000)


def test_a_killed_process_loses_no_call(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dpray.runs.call_cache import Call, CallCache\n"
        "cache = CallCache(Path(sys.argv[1]))\n"
        "for i in range(50):\n"
        "    cache.put(Call(str(i), f'text {i}', 1, 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "calls.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert CallCache(path).totals()["calls"] == 50


def test_a_file_that_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a cache\n" * 100)
    with pytest.raises(DprayError, match="holds no calls"):
        CallCache(tmp_path / "text")


PLAN = AugPe(
    AugPeSettings(
        name="aug_pe",
        iterations=3,
        variations=3,
        selection="rank",
        variation="fill_in_the_blanks",
        mask_probability=0.5,
        max_retries=2,
        max_tokens=64,
        word_var=40.0,
    ),
    {"Bars": 4, "Shopping": 3},
    VoteHistogram(4.0),
)


def embed(texts: Sequence[str]) -> np.ndarray:
    return np.array([[len(text), 1.0] for text in texts], dtype=np.float32)


def run(server: Server, path: Path, **options: Any) -> tuple[Population, list[Checkpoint]]:
    """Aug-PE over HTTP; the votes are the texts' lengths, so the result says what was written."""
    checkpoints: list[Checkpoint] = []

    def vote(t: int, S: Population, phi: Mapping[str, np.ndarray]) -> Checkpoint:
        votes = {label: rows[:, 0].astype(np.int64).tolist() for label, rows in phi.items()}
        checkpoints.append(Checkpoint(t, {k: list(v) for k, v in S.items()}, votes))
        return checkpoints[-1]

    config = EngineConfig(model="m", base_url=server.url, api_key="k", max_in_flight=4, **options)
    api = OpenAIEngine(config)
    prompts = load_variation_prompts("yelp", "fill_in_the_blanks", PLAN.records)
    cache = CallCache(path)
    ask = partial(ask_cached, api, cache)
    AugPeRun(PLAN, prompts, ask, embed, vote, "5a" * 16).algorithm_1()
    return PLAN.kept(checkpoints[-1], "5a" * 16), checkpoints


def test_a_run_over_a_bad_endpoint(tmp_path: Path) -> None:
    """500s, lost connections, empty, refused and over-long texts."""
    empty = chat(message={"role": "assistant", "content": " "})
    refused = chat(message={"role": "assistant", "content": "I'm sorry, I cannot."})
    long = chat(message={"role": "assistant", "content": "word " * 5000})
    with running_server() as server:
        server.faults = [500, 0, empty, refused, long, 503, empty, 429]
        result, checkpoints = run(server, tmp_path / "calls.jsonl", attempts=30)
        assert not server.faults
    assert {label: len(texts) for label, texts in result.items()} == dict(PLAN.records)
    written = [x for c in checkpoints for texts in c.population.values() for x in texts]
    assert all(written) and not any("sorry" in text for text in written)
    longest = "word " * 63 + "word"
    assert max(len(text.split()) for text in written if "word word" in text) == 64
    assert longest in written
    # Three answers were empty or refused: three calls more.
    assert CallCache(tmp_path / "calls.jsonl").totals()["calls"] == PLAN.llm_calls + 3


def test_a_run_that_the_endpoint_ended_goes_on_without_asking_twice(tmp_path: Path) -> None:
    with running_server() as server:
        whole, undisturbed = run(server, tmp_path / "whole.jsonl")
    with running_server() as server:
        server.answers_left = 30
        with pytest.raises(EngineError, match="HTTP status 500"):
            run(server, tmp_path / "calls.jsonl", attempts=1)
        assert server.answered == 30
        server.answers_left = 10**9
        result, checkpoints = run(server, tmp_path / "calls.jsonl")
        assert server.answered == PLAN.llm_calls
    assert (result, checkpoints) == (whole, undisturbed)
    assert CallCache(tmp_path / "calls.jsonl").totals()["calls"] == PLAN.llm_calls
