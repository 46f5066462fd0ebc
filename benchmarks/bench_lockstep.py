"""Private lockstep decoding against plain sampling: tokens per second on the same requests.

    python -m benchmarks.bench_lockstep [--json] [--rows 32] [--tokens 16] [--rounds 3]
        [--frame 0] [--shape tiny]

Random models of Llama's shape with large vocabularies. They are tiny, so that what chooses tokens
weighs as much as it can, or have the layers of a model that people use (`--shape`). A token is one
row's: G groups of R rows (R - 1 private prompts and the public one) and T positions are G * R * T
tokens, whoever samples them; nobody makes text of them. On a CPU the seconds are those of the
process's CPU time, which other work on the machine hardly changes. The ways take turns; a ratio is
the median of the rounds' ratios. The prefix cache is emptied before every measurement. All prompts
begin with the same `--frame` words, which it computes once. A way with a schema is compared with
plain sampling with the same one, in vLLM's structured outputs.

`seconds` are those of a group's text. `selector` is the time in which tokens are chosen, for each
group and step, and its share of the whole time: on a GPU the host's, its waiting included.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from string import ascii_lowercase
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, Prompt
from dpray.engines.schema.schema import Form, Schema
from dpray.engines.vllm.engine import VllmEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.mechanism import PrivateToken
from tests.engines.tiny_model import make_model, sentence

CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 256, "intermediate": 704, "layers": 4, "heads": 4},
    "smollm2-135m": {
        "hidden": 576, "intermediate": 1536, "layers": 30, "heads": 9, "key_value_heads": 3,
    },
    "llama-1b": {
        "hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "key_value_heads": 8,
    },
}  # fmt: skip
RECENTRED = {"clip": "recentred", "clip_bound": 10.0, "temperature": 2.0}
DCLIP = {"clip": "dclip", "clip_bound": 2.0, "temperature": 1.0}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, greedy": {},
    "recentred": RECENTRED,
    "dclip": DCLIP,
    "dclip, top_k_plus": DCLIP | {"candidates": "top_k_plus", "k": 1024},
    "sparse vector": RECENTRED | {"threshold": 0.3, "noise": 0.1},
    "public gate": RECENTRED | {"sure_probability": 0.9},
    "plain, schema": {},
    "dclip, schema": DCLIP,
}
ANY_TEXT = Schema("regex", ".*")
"""It allows nearly all tokens everywhere: what a mask costs, and nothing of what it saves."""


@dataclass
class Measured:
    tokens_per_second: float
    selector_ms: float
    share: float


class Bench:
    """Times the ways on one model; `selecting` counts the seconds in the selectors. `alone` takes
    kernels that are invariant to the batch, or computes public rows by themselves."""

    def __init__(
        self, folder: Path, rows: int, tokens: int, frame: int, alone: bool = False
    ) -> None:
        self.folder = str(folder)
        config = EngineConfig(model=str(folder), kv_cache_gib=1.0)
        self.engine: Any = VllmEngine(config, private_rows=alone, public_alone=alone)
        self.rows, self.tokens, self.selecting = rows, tokens, 0.0
        self.frame = sentence(random.Random(2), frame)
        worker = self.engine.llm.llm_engine.model_executor.driver_worker.worker
        processor = worker._lockstep_processor()
        force = processor.force

        def timed(logits: torch.Tensor) -> torch.Tensor:
            _wait()  # for the model: its time is not the selectors'
            began = CLOCK()
            logits = force(logits)
            _wait()
            self.selecting += CLOCK() - began
            return logits

        processor.force = timed

    def measure(self, way: str, groups: int) -> Measured:
        form = Form(ANY_TEXT, self.folder).mask_arguments(self.tokens) if "schema" in way else None
        requests = made_up(
            self.engine, groups, self.rows, self.tokens, WAYS[way], frame=self.frame, form=form
        )
        self.engine.llm.reset_prefix_cache()
        self.selecting = 0.0
        began = CLOCK()
        is_plain = way.startswith("plain")
        tokens = self._plain(requests, way) if is_plain else self._private(requests)
        seconds = CLOCK() - began
        group_steps = tokens / self.rows
        return Measured(
            tokens / seconds, 1e3 * self.selecting / group_steps, self.selecting / seconds
        )

    def _private(self, groups: list[LockstepGroup]) -> int:
        texts = self.engine.decode_lockstep(groups)
        return self.rows * sum(len(text.token_ids) for text in texts)

    def _plain(self, groups: list[LockstepGroup], way: str) -> int:
        params = self.engine.sampling_params(
            temperature=0.0 if "greedy" in way else 1.0,
            max_tokens=self.tokens,
            ignore_eos="schema" not in way,
            detokenize=False,
            structured_outputs=self.engine.form(ANY_TEXT) if "schema" in way else None,
        )
        prompts = [{"prompt_token_ids": list(ids)} for group in groups for ids in group.prompts]
        outputs = self.engine.llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def made_up(
    engine: Any,
    groups: int,
    rows: int,
    tokens: int,
    mechanism: dict[str, Any],
    *,
    frame: str = "",
    form: dict[str, Any] | None = None,
    seed: int = 1,
) -> list[LockstepGroup]:
    """Return groups of `rows - 1` private prompts and a public one, for any engine."""
    rng = random.Random(seed)
    token = PrivateToken(
        batch_size=rows - 1,
        private_tokens=10**9,
        public_temperature=1.5,
        **(RECENTRED | mechanism),
    )
    private = [
        engine.encode(Prompt(f"{frame} {sentence(rng, rng.randint(10, 30))}", "Text:"))
        for _ in range(groups * (rows - 1))
    ]
    return [
        LockstepGroup(
            str(number),
            tuple(private[number::groups]),
            engine.encode(Prompt(f"{frame} a text about anything", "Text:")),
            token.selector(new_key(), form=form),
            tokens,
        )
        for number in range(groups)
    ]


def fill_vocabulary(folder: Path, size: int) -> None:
    """Give every logit a token of its own, as a real tokenizer has: made-up words."""
    file, rng = folder / "tokenizer.json", random.Random(0)
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    while len(vocabulary) < size:
        word = "".join(rng.choices(ascii_lowercase, k=rng.randint(4, 9)))
        vocabulary.setdefault(f"\u0120{word}", len(vocabulary))
    file.write_text(json.dumps(tokenizer))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds_of(bench: Bench, groups: int, rounds: int, ways: list[str]) -> dict[str, dict[str, Any]]:
    for way in ways:
        bench.measure(way, 1)  # the first one pays for lazy set-up
    found: dict[str, list[Measured]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(bench.measure(way, groups))

    def ratio(way: str) -> float:
        plain = found["plain, schema" if "schema" in way else "plain"]
        pairs = zip(found[way], plain, strict=True)
        return median(one.tokens_per_second / other.tokens_per_second for one, other in pairs)

    return {
        way: {name: median(asdict(one)[name] for one in each) for name in asdict(each[0])}
        | {"ratio": ratio(way)}
        for way, each in found.items()
    }


def main(
    vocabulary: list[int] = [49_152, 128_256],  # noqa: B006
    groups: list[int] = [4, 16],  # noqa: B006
    way: list[str] = list(WAYS),  # noqa: B006
    rows: int = 32,
    tokens: int = 16,
    rounds: int = 3,
    frame: int = 0,
    shape: str = "tiny",
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    table = Table(title=f"{shape}, groups of {rows} rows, {tokens} tokens")
    for column in ("vocabulary", "groups", "way", "seconds", "of plain", "selector, ms", "share"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for size in vocabulary:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), vocabulary=size, context=512, **SHAPES[shape])
            fill_vocabulary(model, size)
            bench = Bench(model, rows, tokens, frame)
            for number in groups:
                result = rounds_of(bench, number, rounds, way)
                if as_json:
                    print(json.dumps({"vocabulary": size, "groups": number, "ways": result}))
                for name, one in result.items():
                    table.add_row(
                        *(
                            f"{size:,}",
                            str(number),
                            name,
                            f"{rows * tokens / one['tokens_per_second']:.2f}",
                        ),
                        *(f"{one['ratio']:.2f}", f"{one['selector_ms']:.1f}"),
                        f"{one['share']:.0%}",
                    )
            bench.engine.close()
    if not as_json:
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
