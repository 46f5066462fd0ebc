"""A driver whose engine has a fault in it.

The engine is `Words`, which starts in no time, where a real one costs an actor eight seconds of a
core, and the driver that reads its tokenizer as many; real ones are in `test_ray_run`,
`test_engine_pool`, and `test_kills` (vLLM). So it is with the embedder, `BagOfWords`; a real one is
in `test_aug_pe_ray`.

`python driver.py FAULT MARKER CONFIG` runs a configuration like `dpray run CONFIG --json`.
The file MARKER is seen by all processes of the cluster. FAULT is

- `none`;
- `fails_once`: `decode_lockstep` raises when two texts of a call are finished, and makes MARKER,
  after which it does not;
- `full_once`: the same, as Ray's memory monitor ends a process;
- `waits`: when three texts of groups are finished, or two prompts are answered, an engine makes a
  file MARKER.PID and waits until MARKER is there, and nobody has the last of these;
- `slow`: every text takes a fifth of a second, and the file MARKER.begun gets a line with the name
  of each group when its first text begins;
- `loads_once`: only the first engine that is loaded, anywhere, can be, and makes MARKER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpray.engines.base import (
    Completion,
    DeviceLost,
    Engine,
    EngineError,
    Following,
    LockstepGroup,
    LockstepResult,
    OnCompletion,
    Prompt,
    Prompts,
    Samplings,
    nothing_follows,
    select_token,
)
from dpray.methods import registry as methods
from dpray.methods.config import load_config
from dpray.types import DprayError
from dpray.workers import shards
from tests.engines.bag_of_words import BagOfWords

VOCABULARY = 64


class Words:
    """Is an `Engine` whose logits are a function of a row's own prompt and of the text so far."""

    context_length = 512
    shares_public_pass = False

    def close(self) -> None: ...

    def rows_at_once(self, tokens: int) -> int:
        return 1000

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        words = f"{prompt.user} {prompt.prefix}".split()
        return tuple(crc32(word.encode()) % VOCABULARY for word in words)

    def truncate(self, text: str, max_tokens: int) -> str:
        return " ".join(text.split()[:max_tokens])

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        completions = []
        for i, prompt in enumerate(prompts):
            ids = self.encode(prompt)[: samplings[i].max_tokens]
            completions.append(Completion(text_of(ids), len(ids), len(ids)))
            if on_completion is not None:
                on_completion(i, completions[-1])
        return completions

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        for first in groups:
            group: LockstepGroup | None = first
            while group is not None:
                result = decoded(group)
                group = following(result)
                yield result


def decoded(group: LockstepGroup) -> LockstepResult:
    # Imported late: the driver needs no torch.
    import torch

    selector = group.selector.build()
    tokens: list[int] = []
    while len(tokens) < group.max_tokens:
        rows = [logits(prompt, tokens) for prompt in group.prompts]
        logits_SV = torch.from_numpy(np.array(rows, dtype=np.float32))
        token = select_token(selector, logits_SV[:-1], logits_SV[-1])
        if token is None:
            break
        tokens.append(token)
    whole = len(tokens) == group.max_tokens
    return LockstepResult(
        group.group_id,
        text_of(tokens),
        tuple(tokens),
        "length" if whole else "exhausted",
        selector.state(),
    )


def logits(prompt: Sequence[int], tokens: Sequence[int]) -> Any:
    seed = crc32(bytes([*prompt, *tokens]))
    return np.random.default_rng(seed).normal(size=VOCABULARY)


def text_of(tokens: Iterable[int]) -> str:
    return " ".join(f"word{token}" for token in tokens)


def first_time(marker: str) -> bool:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Faulty:
    """An engine with a fault, which begins a group, or has a text or the answer to a prompt."""

    def __init__(self, engine: Engine, marker: str) -> None:
        self.engine, self.marker = engine, Path(marker)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def on_group(self, group: LockstepGroup) -> None: ...

    def before_text(self, number: int) -> None: ...

    def on_text(self, finished: int) -> None: ...

    def on_answer(self, answered: int) -> None: ...

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        def begun() -> Iterator[LockstepGroup]:
            for group in groups:
                self.on_group(group)
                yield group

        texts = self.engine.decode_lockstep(begun(), following)
        for number, text in enumerate(texts, start=1):
            self.before_text(number)
            yield text
            self.on_text(number)

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        answered = count(1)

        def heard(i: int, completion: Completion) -> None:
            if on_completion is not None:
                on_completion(i, completion)
            self.on_answer(next(answered))

        return self.engine.generate(prompts, samplings, heard)


class FailsOnce(Faulty):
    def on_text(self, finished: int) -> None:
        if finished == 2 and first_time(str(self.marker)):
            raise DeviceLost("a rank is dead")


class FullOnce(Faulty):
    def on_text(self, finished: int) -> None:
        if finished == 2 and first_time(str(self.marker)):
            # Imported late: no driver needs it.
            from ray.exceptions import OutOfMemoryError

            raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")


class Waits(Faulty):
    def before_text(self, number: int) -> None:
        # The probe of the engine's rounding comes before, one text at a time.
        if number == 3:
            self.wait()  # With a text that nobody has: its batch is under way.

    def on_answer(self, answered: int) -> None:
        if answered == 2:
            self.wait()

    def wait(self) -> None:
        self.marker.with_suffix(f".{os.getpid()}").touch()
        while not self.marker.exists():
            time.sleep(0.05)


class Slow(Faulty):
    def on_group(self, group: LockstepGroup) -> None:
        with open(self.marker.with_suffix(".begun"), "a") as file:
            file.write(f"{group.group_id}\n")

    def on_text(self, finished: int) -> None:
        time.sleep(0.2)

    def on_answer(self, answered: int) -> None:
        time.sleep(0.2)


def build(fault: str, marker: str, *_: Any, **__: Any) -> Any:
    if fault == "loads_once" and not first_time(marker):
        raise EngineError("there is no GPU here")
    engine: Any = Words()
    faulty = {"fails_once": FailsOnce, "full_once": FullOnce, "waits": Waits, "slow": Slow}
    return faulty[fault](engine, marker) if fault in faulty else engine


class ShardActor(shards.ShardActor):
    def __init__(self, *arguments: Any) -> None:
        shards.SentenceTransformerEmbedder = BagOfWords  # type: ignore[misc,assignment]
        super().__init__(*arguments)


def main(fault: str, marker: str, path: str, *overrides: str) -> int:
    voting = {"ShardActor": ShardActor, "SentenceTransformerEmbedder": BagOfWords}
    try:
        with mock.patch.multiple(shards, **voting):
            report = methods.run(
                load_config(path, [*overrides]), build=partial(build, fault, marker)
            )
    except DprayError as error:
        print(f"dpray: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
