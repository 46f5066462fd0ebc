"""Measurements of the transformers engine on a model with random weights: on a GPU one of the shape
of Llama 3.2 1B (1.5 billion parameters, its embeddings not tied)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from benchmarks.bench_lockstep import DCLIP, SHAPES, WAYS, fill_vocabulary, made_up
from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, PlainPrompt, Sampling
from dpray.engines.fixed_pass import Capture, as_graph
from dpray.engines.passes import load_model, prefill
from dpray.engines.row_variation import row_variation
from dpray.engines.transformers import TransformersEngine
from tests.engines.tiny_model import make_model

Row = dict[str, Any]

DTYPES = ("float32", "bfloat16")
PROBES = (
    ("invariant", "bfloat16"),
    ("FlashAttention 3", "bfloat16"),
    ("ordinary", "bfloat16"),
    ("invariant", "float32"),
)
CHUNKS = (5, 16)
ONE_BILLION = SHAPES["llama-1b"] | {"context": 512, "spread": 0.05, "dtype": torch.bfloat16}
TINY = {"context": 256}
LONGEST = 128
"""The tokens of a prompt that is made up, and some more."""
REPEATED: Capture = as_graph if torch.cuda.is_available() else lambda compute: compute
WAYS_MEASURED = ("recentred", "dclip", "dclip, top_k_plus")


@contextmanager
def random_model(small: bool, vocabulary: int) -> Iterator[str]:
    """Yield the folder of a model that is made on the device."""
    shape: dict[str, Any] = TINY if small else ONE_BILLION
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            make_model(Path(folder), vocabulary=vocabulary, **shape)
        fill_vocabulary(Path(folder), vocabulary)
        yield folder


def rows(small: bool) -> Iterator[Row]:
    """Measure how far a row's logits move with the rows beside it (`row_variation`)."""
    beside = 9 if small else 64
    with random_model(small, 512 if small else 49_152) as folder:
        for dtype in DTYPES[:1] if small else DTYPES:
            engine = TransformersEngine(config(folder, dtype))
            change = row_variation(engine, beside)
            engine.close()
            yield {"dtype": dtype, "rows": beside, "logits moved, nats": change}


def probe(small: bool) -> Iterator[Row]:
    """Make vLLM's start-up test with each kind of kernels: how far a row's logits move with the
    rows of its pass, and with prompts that are computed meanwhile."""
    with random_model(small, 512 if small else 49_152) as folder:
        programs = [
            printed("row_driver", folder, dtype, kernels)
            for kernels, dtype in (PROBES[-1:] if small else PROBES)
        ]
        yield from side_by_side(programs)


def probed(folder: str, dtype: str, kernels: str) -> Row:
    """Return what `row_driver.py` prints."""
    [found] = printed("row_driver", folder, dtype, kernels)
    return found


def printed(driver: str, *arguments: object) -> Iterator[Row]:
    """Yield the rows that a program of this folder prints, as they come."""
    script = Path(__file__).with_name(f"{driver}.py")
    command = [sys.executable, str(script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"'):
                yield dict(json.loads(line))
        if process.wait():
            errors.seek(0)
            told = errors.read().strip()
            print(told[-4000:], file=sys.stderr, flush=True)
            raise RuntimeError(f"{driver} {arguments[1:]}: {told[-200:]}")


def side_by_side(programs: Sequence[Iterator[Row]]) -> Iterator[Row]:
    """Yield the rows of programs that run at the same time, as they come. One that fails leaves the
    others' rows; its error is raised after them."""
    rows = SimpleQueue[Row | Exception | None]()

    def run(program: Iterator[Row]) -> None:
        try:
            for row in program:
                rows.put(row)
        except Exception as error:
            rows.put(error)
        rows.put(None)

    for program in programs:
        Thread(target=run, args=(program,), daemon=True).start()
    ended, failed = 0, list[Exception]()
    while ended < len(programs):
        match rows.get():
            case None:
                ended += 1
            case Exception() as error:
                failed.append(error)
            case row:
                yield row
    if failed:
        raise failed[0]


def vllm(small: bool) -> Iterator[Row]:
    """Measure private decoding in vLLM beside plain sampling of the same requests. All models are
    loaded at the same time: most of a start is Python's and the compiler's."""
    tokens, groups, *sizes = (4, 1, 4) if small else (32, 4, 16, 64)

    def program(vocabulary: int, folder: str, kernels: str) -> Iterator[Row]:
        for row in printed("lockstep_driver", folder, kernels, tokens, groups, *sizes):
            yield {"vocabulary": vocabulary} | row

    with ExitStack() as models:
        vocabularies = (512,) if small else (49_152, 128_256)
        folders = {size: models.enter_context(random_model(small, size)) for size in vocabularies}
        kinds = ("ordinary",) if small else ("invariant", "ordinary")
        yield from side_by_side(
            [
                program(size, folder, kernels)
                for size, folder in folders.items()
                for kernels in kinds
            ]
        )


def chunks(small: bool) -> Iterator[Row]:
    """Compare a group that goes through the model in chunks of rows with the whole group: its
    tokens from the same coins, and the logits after its prompts."""
    size, tokens = (12, 6) if small else (65, 16)
    with random_model(small, 512 if small else 49_152) as folder:
        for dtype in DTYPES[:1] if small else DTYPES:
            whole = TransformersEngine(config(folder, dtype))
            [group] = made_up(whole, 1, size, tokens, DCLIP)
            drawn = tokens_of(whole, group)
            changes = moved_by_chunks(folder, dtype, group)
            for chunk in CHUNKS:
                engine = TransformersEngine(config(folder, dtype), max_rows=chunk)
                same = zip(drawn, tokens_of(engine, group), strict=False)
                engine.close()
                yield {
                    "dtype": dtype,
                    "rows": size,
                    "rows in a chunk": chunk,
                    "tokens": len(drawn),
                    "same tokens": first_difference(list(same)),
                    "logits moved, nats": changes[chunk],
                }
            whole.close()


def lockstep(small: bool) -> Iterator[Row]:
    """Measure private decoding of groups side by side, in passes of fixed shape, which a GPU
    replays as CUDA graphs: in tokens of all rows a second, of s private rows and a public one. It
    is compared with transformers' plain sampling of the same requests, and with the same passes, of
    which each row draws a token of its own."""
    tokens, groups = (4, 2) if small else (32, 8)
    for vocabulary in (512,) if small else (49_152, 128_256):
        with random_model(small, vocabulary) as folder:
            for s in (4,) if small else (16, 64):
                for found in of_size(folder, small, s, tokens, groups):
                    yield {"vocabulary": vocabulary, "s": s} | found


def of_size(folder: str, small: bool, s: int, tokens: int, groups: int) -> Iterator[Row]:
    engine = TransformersEngine(
        config(folder, "float32" if small else "bfloat16"),
        group=(s + 1, LONGEST + tokens),
        lanes=groups,
        capture=REPEATED,
    )
    assert engine._lanes is not None

    def speed(decode: Callable[..., int], mechanism: dict[str, Any] = {}) -> float:  # noqa: B006
        """Return tokens of all rows a second. Others of the same shape pay for lazy set-up."""
        began = 0.0
        for seed in (1, 2):
            requests = made_up(engine, groups, s + 1, tokens, mechanism, seed=seed)
            began = time.perf_counter()
            made = decode(engine, requests)
        return float(made / (time.perf_counter() - began))

    plain = speed(sampled)
    yield {"way": "plain, transformers", "tokens a second": plain}
    same = speed(sampled_in_lanes)
    yield {"way": "plain, these passes", "tokens a second": same, "of plain": same / plain}
    for way in WAYS_MEASURED:
        private = speed(decoded, WAYS[way])
        row: Row = {"way": way, "tokens a second": private, "of plain": private / plain}
        row |= {"of plain, these passes": private / same}
        yield row | {"public rows in a pass": engine._lanes.public.inputs.shape[1]}
    engine.close()


def decoded(engine: TransformersEngine, requests: list[LockstepGroup]) -> int:
    texts = engine.decode_lockstep(requests)
    return len(requests[0].prompts) * sum(len(text.token_ids) for text in texts)


def sampled(engine: TransformersEngine, requests: list[LockstepGroup]) -> int:
    """Sample a text for each prompt, of all groups at once; return the number of tokens."""
    prompts = [
        PlainPrompt(engine.tokenizer.decode(ids[1:])) for group in requests for ids in group.prompts
    ]
    made = engine.generate(prompts, [Sampling(requests[0].max_tokens)] * len(prompts))
    return sum(each.completion_tokens for each in made)


@torch.inference_mode()
def sampled_in_lanes(engine: TransformersEngine, requests: list[LockstepGroup]) -> int:
    """Sample a text for each private prompt, by the passes of its group's lane."""
    lanes, tokens = engine._lanes, requests[0].max_tokens
    assert lanes is not None
    for lane, group in enumerate(requests):
        lanes.start(lane, group.private_prompts, group.public_prompt, len(group.prompts))
    rows, one = len(requests) * lanes.rows, lanes.private
    prompts = [prompt for group in requests for prompt in group.private_prompts]
    one.tokens[:rows] = [prompt[-1] for prompt in prompts]
    one.positions[:rows] = [len(prompt) - 1 for prompt in prompts]
    for _ in range(tokens):
        one.step([0])
        drawn = torch.multinomial(one.logits[:rows].softmax(-1), 1)[:, 0]
        one.tokens[:rows] = drawn.cpu().numpy()
        one.positions[:rows] += 1
    return rows * tokens


def config(folder: str, dtype: Any) -> EngineConfig:
    return EngineConfig(model=folder, dtype=dtype)


def tokens_of(engine: TransformersEngine, group: LockstepGroup) -> tuple[int, ...]:
    [text] = engine.decode_lockstep([group])
    return text.token_ids


def first_difference(pairs: list[tuple[int, int]]) -> int:
    """Return the number of equal tokens before the first pair that differs."""
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))


def moved_by_chunks(folder: str, dtype: str, group: LockstepGroup) -> dict[int, float]:
    """Return the largest change of the private rows' first logits, in nats, by size of chunk."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, dtype, device)
    prompts = group.private_prompts
    whole = prefill(model, prompts, device).logits
    found = {}
    for chunk in CHUNKS:
        parts = [prompts[start : start + chunk] for start in range(0, len(prompts), chunk)]
        chunked = torch.cat([prefill(model, part, device).logits for part in parts])
        found[chunk] = float((whole - chunked).abs().max())
    return found
