"""The data sets of four_methods.py: their files, and what a configuration has to say of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, NamedTuple

from runs import DATA, RUNS, rows

from dpray.io.files import write_durably

EPSILONS = (1.0, 4.0, 8.0, inf)

LONGEST_EXAMPLE = 500
"""Characters of a public text that a prompt shows."""

OF_ANOTHER = 2_000
"""Public records of each other set that a model is tuned on."""

MOST_NAMES = 3
"""Names in the cast of a film's record: SmolLM2 writes no end of them."""


VARIANTS = (
    "dp_sgd_longer",
    "dp_sgd_public",
    "chain_kps_aug_pe",
    "chain_kps_private_prediction",
    "chain_kps_dp_sgd",
    "chain_topics_aug_pe",
    "private_prediction_schema",
)
"""Methods that are run at epsilon 4 alone, and with a schema at 1 too."""

TWICE = 2
"""A sentence of a page rests on two runs at least."""

A_NAME = {"type": "string", "minLength": 1}

FILM_SCHEMA = {
    "type": "object",
    "properties": {
        "title": A_NAME,
        "year": {"type": "integer", "minimum": 1900, "maximum": 2023},
        "genres": {"type": "array", "items": A_NAME, "minItems": 1, "maxItems": 5},
        "cast": {"type": "array", "items": A_NAME, "maxItems": MOST_NAMES},
    },
    "required": ["title", "year", "genres", "cast"],
    "additionalProperties": False,
}
"""Its bounds are those of the public records, with few exceptions."""

KINDS = {
    "agnews": ("a short news report", 48),
    "trec": ("a short question about some fact", 24),
    "banking77": ("a short question of a customer to a bank", 32),
}
"""The sets that are run with codes for labels: what kind of text their records are, and the most
tokens of a text that private prediction writes."""

IN_PROCESS = {
    "kind": "vllm",
    "model": "smollm2",
    "dtype": "float32",
    "max_model_len": 768,
    "kv_cache_gib": 2.0,
}

DEPARTMENTS = {
    "Top-ups": "top_up topping",
    "Cash": "cash atm cheque",
    "Transfers": "transfer beneficiary receiving",
    "Currency": "exchange currency currencies",
    "Payments": "payment charge refund debit",
    "Cards": "card",
    "Account": "",
}
"""A bank's intents belong to the first department that has one of their words."""


class DataSet(NamedTuple):
    epsilons: Sequence[float] = (4.0,)
    runs_of_each: int = 1
    control: str = "Kind"
    """Return the label's name in the control codes of DP-SGD."""

    left_out: Sequence[str] = ("private_prediction_bare", *VARIANTS)
    """Methods that are not run."""

    style: str = ""
    """The look of real texts, in words: they have licences of their own."""

    is_json: bool = False
    coded: str = ""
    """The kind of text that the records are, if that is all that is public: their labels are codes,
    and no text of the kind is shown."""

    settings: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Keys of a method that differ from its configuration in experiments/smollm2."""


SETS = {
    "agnews": DataSet(
        EPSILONS,
        3,
        control="News Type",
        left_out=(),
        style="the first one or two sentences of a news agency's report, with names, places and "
        "figures; some have a headline, a byline such as (Reuters), or markup that was left over",
    ),
    "yelp": DataSet(
        EPSILONS,
        3,
        control="Business Category",
        left_out=sorted({*VARIANTS} - {"dp_sgd_public", "chain_kps_dp_sgd"}),
        style="a customer's review in the first person and everyday words, with a verdict, what "
        "was ordered or done, the staff, and often many exclamation marks",
    ),
    "banking77": DataSet(
        control="Question about",
        style="a customer's question to a bank, one or two short sentences, often about a card or "
        "a transfer that did not work",
    ),
    "pubmed": DataSet(
        runs_of_each=TWICE,
        style="a medical abstract: background and aim, then methods, results with figures, and a "
        "conclusion, with many abbreviations",
    ),
    "wikimovies": DataSet(
        runs_of_each=TWICE,
        left_out=sorted({"private_prediction_bare", *VARIANTS} - {"private_prediction_schema"}),
        is_json=True,
        style="a JSON record of a film with the keys title, year, genres and cast, at most three "
        "names",
        settings={
            # All records have the same keys, which are a run of tokens that a text has to copy.
            "private_prediction": ["method.max_tokens=80", "method.longest_copy=12"],
            "private_prediction_schema": [
                "method.max_tokens=80",
                "method.longest_copy=12",
                f"data.text={json.dumps(FILM_SCHEMA['required'])}",
                f"method.schema={json.dumps(FILM_SCHEMA)}",
            ],
            "aug_pe": ["method.max_tokens=80"],
            "dp_kps": ["method.max_tokens=80"],
            "dp_sgd": ["method.max_length=80"],
        },
    ),
    **{
        f"{name}_coded": DataSet(
            (1.0, inf),
            TWICE,
            control="Kind",
            left_out=sorted({"private_prediction", *VARIANTS}),
            style=f"{kind}; its label is a code of the private records",
            coded=kind,
            settings={
                "private_prediction_bare": [f"method.max_tokens={tokens}"],
                "private_prediction_other": [f"method.max_tokens={tokens}"],
                "aug_pe": [f"engine={json.dumps(IN_PROCESS)}"],
            },
        )
        for name, (kind, tokens) in KINDS.items()
    },
}


@cache
def part(data: str, name: str) -> Path:
    """Return the file of a data set's `private`, `public` or `test` records."""
    if SETS[data].coded:
        return coded_records(data.removesuffix("_coded"), name)
    path = DATA / data / f"{name}.jsonl"
    return film_records(path, name) if SETS[data].is_json else path


def coded_records(data: str, name: str) -> Path:
    """Write the records of a file with codes in place of labels; return the file."""
    made = RUNS / "smollm2" / "coded" / data / f"{name}.jsonl"
    made.parent.mkdir(parents=True, exist_ok=True)
    named = {row["label"] for row in rows(DATA / data / "public.jsonl")}
    groups = {label: department(label) if data == "banking77" else label for label in named}
    codes = dict(zip(sorted(set(groups.values())), ascii_uppercase, strict=False))
    found = rows(DATA / data / f"{name}.jsonl")
    coded = ({"text": row["text"], "label": codes[groups[row["label"]]]} for row in found)
    # Runs that are made side by side read these files.
    write_durably(made, "".join(json.dumps(row) + "\n" for row in coded))
    return made


def department(intent: str) -> str:
    name = intent.casefold()
    return next(
        department
        for department, words in DEPARTMENTS.items()
        if not words or any(word in name for word in words.split())
    )


def film_records(path: Path, name: str) -> Path:
    """Write the films of a file as JSON records without their extracts, which would take most of
    the tokens, and as columns; return the file."""
    made = RUNS / "smollm2" / "films" / f"{name}.jsonl"
    made.parent.mkdir(parents=True, exist_ok=True)
    texts = (film_record(row) for row in rows(path))
    lines = (json.dumps({"text": text, "label": None} | json.loads(text)) + "\n" for text in texts)
    made.write_text("".join(lines))
    return made


def film_record(film: dict[str, Any]) -> str:
    record = {key: film[key] for key in ("title", "year", "genres", "cast")}
    return json.dumps(record | {"cast": record["cast"][:MOST_NAMES]}, ensure_ascii=False)


@cache
def labels(data: str) -> dict[str, float]:
    """Return the share of each label among the public records; none where there are no labels."""
    return label_shares(part(data, "public"))


def label_shares(path: Path) -> dict[str, float]:
    counts = Counter(row["label"] for row in rows(path))
    counts.pop(None, None)
    return {label: count / counts.total() for label, count in sorted(counts.items())}


@cache
def size(data: str) -> int:
    """N, the number of private records, which is public here."""
    return len(rows(part(data, "private")))


@cache
def short_public_texts(data: str) -> Path:
    """Write the public records that are short enough for a prompt; return the file."""
    path = RUNS / "smollm2" / "prompts" / f"{data}_public.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    short = (row for row in rows(part(data, "public")) if is_short(row["text"]))
    path.write_text("".join(json.dumps(row) + "\n" for row in short))
    return path


@cache
def public_of_others(data: str, label: str | None = None) -> Path:
    """Write the public records of the other coded sets, so many of each, with their own codes or
    with this label; return the file."""
    path = RUNS / "smollm2" / "coded" / f"{label or 'others'}_of_{data}.jsonl"
    others = [name for name in SETS if SETS[name].coded and name != data]
    found = (row for name in others for row in rows(part(name, "public"))[:OF_ANOTHER])
    labelled = (row | {"label": label or row["label"]} for row in found)
    write_durably(path, "".join(json.dumps(row) + "\n" for row in labelled))
    return path


def is_short(text: str) -> bool:
    return len(text) < LONGEST_EXAMPLE
