"""Masks of a schema by llguidance, xgrammar and outlines-core: their time, and hostile schemas.

    python -m tests.benchmarks.bench_masks [--json]

vLLM brings all three. `compile` is the CPU time from a schema to the first mask, `mask` that of a
mask along a text of the schema, `most` the slowest one. A text takes the longest token allowed
that begins what is left of a real record, so that each library sees the same kinds of tokens.
Hostile schemas are compiled in processes of their own, which are ended after a time; the end of a
process, about a second, is in theirs. The larger
vocabulary is SmolLM2's with pairs of its tokens.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from dpray.engines.model_path import resolve_model
from tests.engines.schemas import FILM, VISIT

LIBRARIES = ("llguidance", "xgrammar", "outlines-core")
RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "film": (FILM, {"title": "The Long Road", "year": 1994, "genres": ["Drama", "Western"]}),
    "visit": (
        VISIT,
        {"id": "AB-1234", "date": "2024-03-07", "triage": "soon",
         "vitals": [{"name": "pulse", "value": 81.5}], "note": "Came back with a cough."},
    ),
}  # fmt: skip
HOSTILE: dict[str, dict[str, Any]] = {
    "100,000 values": {"enum": [f"value number {i}" for i in range(100_000)]},
    "a million characters": {"type": "string", "minLength": 1_000_000},
    "a record that never ends": {
        "$ref": "#/$defs/t",
        "$defs": {"t": {"type": "object", "properties": {"c": {"$ref": "#/$defs/t"}},
                        "required": ["c"], "additionalProperties": False}},
    },
    "a regex of many ways": {"type": "string", "pattern": "^(.{0,300}x){0,300}$"},
}  # fmt: skip
SECONDS = 30.0
"""A process with a hostile schema is ended after this time."""


class Matcher(Protocol):
    def allowed(self) -> np.ndarray:
        """Return which tokens may come next, of shape (V,)."""
        ...

    def take(self, token: int) -> None: ...


def tokens_of(size: int) -> tuple[list[bytes], int]:
    """Return the bytes of `size` tokens, and the end token."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    decoder = {sign: byte for byte, sign in byte_signs().items()}
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    found = [bytes(decoder[sign] for sign in name if sign in decoder) for name in names]
    found = [token or b"\xff" for token in found]
    known = dict.fromkeys(found)
    for one, other in pairwise(found[300:] + found[300::7] + found[300::5]):
        if len(found) >= size:
            break
        if (pair := one + other) not in known:
            known[pair] = None
            found.append(pair)
    return found[:size], tokenizer.eos_token_id


def byte_signs() -> dict[int, str]:
    """Return the sign of each byte in the names of GPT-2's tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}


def llguidance(tokens: list[bytes], eos: int) -> Callable[[str], Matcher]:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    from dpray.engines.schema.schema import Schema, compile_limits

    class Words:
        def __init__(self) -> None:
            self.tokens, self.eos_token_id, self.bos_token_id = tokens, eos, None
            self.special_token_ids = [eos]

        def __call__(self, text: bytes | str) -> list[int]:
            return [
                tokens.index(bytes([b]))
                for b in (text if isinstance(text, bytes) else text.encode())
            ]

    tokenizer = LLTokenizer(TokenizerWrapper(Words()))

    class Matching:
        def __init__(self, schema: str) -> None:
            grammar = Schema("json", schema).grammar
            self.of = LLMatcher(tokenizer, grammar, log_level=0, limits=compile_limits())
            if self.of.is_error():
                raise ValueError("refused")

        def allowed(self) -> np.ndarray:
            bits = np.frombuffer(self.of.compute_bitmask(), dtype=np.uint8)
            return np.unpackbits(bits, count=len(tokens), bitorder="little").view(bool)

        def take(self, token: int) -> None:
            assert self.of.consume_token(token)

    return Matching


def xgrammar(tokens: list[bytes], eos: int) -> Callable[[str], Matcher]:
    import xgrammar as xg

    info = xg.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[eos])
    compiler = xg.GrammarCompiler(info, cache_enabled=False, max_threads=1)

    class Matching:
        def __init__(self, schema: str) -> None:
            self.of = xg.GrammarMatcher(compiler.compile_json_schema(schema, any_whitespace=False))
            self.bits = xg.allocate_token_bitmask(1, len(tokens))

        def allowed(self) -> np.ndarray:
            self.of.fill_next_token_bitmask(self.bits)
            return unpacked(self.bits, len(tokens))

        def take(self, token: int) -> None:
            assert self.of.accept_token(token)

    return Matching


def outlines(tokens: list[bytes], eos: int) -> Callable[[str], Matcher]:
    import outlines_core as oc

    words: dict[bytes, list[int]] = {}
    for number, token in enumerate(tokens):
        if number != eos:
            words.setdefault(token, []).append(number)
    vocabulary = oc.Vocabulary(eos, words)

    class Matching:
        def __init__(self, schema: str) -> None:
            regex = oc.json_schema.build_regex_from_schema(schema, whitespace_pattern=" ?")
            self.of = oc.Guide(oc.Index(regex, vocabulary))
            self.bits = torch.zeros((1, -(-len(tokens) // 32)), dtype=torch.int32)

        def allowed(self) -> np.ndarray:
            bits = self.bits[0]
            self.of.write_mask_into(bits.data_ptr(), bits.numel(), bits.element_size())
            return unpacked(self.bits, len(tokens))

        def take(self, token: int) -> None:
            self.of.advance(token)

    return Matching


MAKE = dict(zip(LIBRARIES, (llguidance, xgrammar, outlines), strict=True))


def unpacked(bits: torch.Tensor, size: int) -> np.ndarray:
    return np.unpackbits(bits[0].numpy().view(np.uint8), count=size, bitorder="little").view(bool)


def measured(library: str, size: int, name: str) -> dict[str, float]:
    tokens, eos = tokens_of(size)
    make = MAKE[library](tokens, eos)
    schema, record = RECORDS[name]
    began = time.process_time()
    matcher = make(json.dumps(schema))
    allowed = matcher.allowed()
    compiled = time.process_time() - began
    left, times = json.dumps(record).encode(), []
    by_token = {token: number for number, token in enumerate(tokens)}
    while left:
        longest = next(n for n in range(min(len(left), 24), 0, -1)
                       if left[:n] in by_token and allowed[by_token[left[:n]]])  # fmt: skip
        matcher.take(by_token[left[:longest]])
        left = left[longest:]
        began = time.process_time()
        allowed = matcher.allowed()
        times.append(time.process_time() - began)
    return {"compile": compiled, "mask": median(times), "most": max(times), "masks": len(times)}


def refused(library: str, schema: str, answer: Any) -> None:
    tokens, eos = tokens_of(49_152)
    make = MAKE[library](tokens, eos)
    answer.put("begins")
    try:
        make(schema).allowed()
    except BaseException as error:
        answer.put(f"refused ({type(error).__name__})")
    else:
        answer.put("taken")


def hostile(library: str, name: str) -> dict[str, Any]:
    """Return what becomes of a hostile schema, and in how many seconds."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=refused, args=(library, json.dumps(HOSTILE[name]), answer))
    process.start()
    assert answer.get(timeout=300) == "begins"
    began = time.perf_counter()
    process.join(SECONDS)
    seconds = time.perf_counter() - began
    outcome = "is not done" if process.is_alive() else "ends the process"
    if not answer.empty():
        outcome = answer.get()
    process.kill()
    process.join()
    return {"outcome": outcome, "seconds": seconds}


def main(as_json: bool = typer.Option(False, "--json")) -> None:
    found = [
        {"library": library, "vocabulary": size, "schema": name} | measured(library, size, name)
        for size in (49_152, 128_256)
        for name in RECORDS
        for library in LIBRARIES
    ]
    tried = [
        {"library": library, "schema": name} | hostile(library, name)
        for name in HOSTILE
        for library in LIBRARIES
    ]
    if as_json:
        print(json.dumps({"masks": found, "hostile": tried}))
        return
    table = Table("vocabulary", "schema", "library", "compile, ms", "mask, µs", "most, µs")
    for row in found:
        times = [
            f"{1e3 * row['compile']:.1f}",
            *(f"{1e6 * row[key]:.0f}" for key in ("mask", "most")),
        ]
        table.add_row(f"{row['vocabulary']:,}", row["schema"], row["library"], *times)
    Console().print(table)
    table = Table("hostile schema", "library", "outcome", "seconds")
    for row in tried:
        table.add_row(row["schema"], row["library"], row["outcome"], f"{row['seconds']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
