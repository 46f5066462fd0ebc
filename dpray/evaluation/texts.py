"""Texts are compared by their lengths, their topics and their structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from scipy.stats import wasserstein_distance

from dpray.evaluation.downstream import summaries
from dpray.io.table import parse_json
from dpray.mechanisms.term_matcher import count_words
from dpray.mechanisms.topics import SplitWords, class_terms, clusters_of
from dpray.types import InputError, Json

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

TOPICS = 10
TOPIC_TERMS = 6

MIN_RECORDS = 3
"""A term occurs in at least this many records: a name in a single record is not shown."""


def compare_lengths(
    synthetic: Sequence[str], train: Sequence[str], test: Sequence[str], seeds: int
) -> dict[str, object]:
    """Compare the word counts of synthetic and of real test texts, and measure the 1-Wasserstein
    distance between the two, in words (Villani 2009, Section 6).

    The reference is the same distance between the real test texts and other real ones (`train`).
    Distances shrink with the size of the samples. So every seed draws equally many synthetic and
    other real texts, and all test texts again (bootstrap). No sequence is empty.
    """
    synthetic_words, train_words, test_words = (
        np.array([*map(count_words, texts)]) for texts in (synthetic, train, test)
    )
    size = min(len(synthetic), len(train))
    sides = {"synthetic_to_real": synthetic_words, "real_to_real": train_words}
    draws: list[dict[str, float]] = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        draws.append({})
        for side, words in sides.items():
            sample, tested = rng.choice(words, size), rng.choice(test_words, len(test_words))
            draws[-1][side] = float(wasserstein_distance(sample, tested))
    return {
        "unit": "words",
        "real": _summary(test_words),
        "synthetic": _summary(synthetic_words),
        "wasserstein": {**summaries(draws), "sample_size": size},
    }


def _summary(words: np.ndarray) -> dict[str, object]:
    quantiles = {str(q): float(np.quantile(words, q)) for q in QUANTILES}
    return {"mean": float(words.mean()), "quantiles": quantiles}


def compare_topics(
    texts: Sequence[Sequence[str]], vectors: Sequence[np.ndarray], words: SplitWords | None = None
) -> list[dict[str, object]]:
    """Return the topics of synthetic, other real and real test records (`texts` and `vectors` in
    this order). Each topic has its terms and its share of each set; the most common in the test set
    comes first.

    The topics are clusters of all records together, by k-means. Their terms have the highest
    class-based TF-IDF (`class_terms`); `words` splits a text.
    """
    pooled = [text for side in texts for text in side]
    topic_of, means = clusters_of(np.vstack(vectors), max(1, min(TOPICS, len(pooled) // 10)))
    terms = class_terms(pooled, topic_of, len(means), TOPIC_TERMS, MIN_RECORDS, words)
    parts = np.split(topic_of, np.cumsum([len(side) for side in texts])[:-1])
    made, other, real = (np.bincount(part, minlength=len(means)) / len(part) for part in parts)
    return [
        {
            "terms": terms[topic],
            "synthetic": float(made[topic]),
            "other_real": float(other[topic]),
            "real": float(real[topic]),
        }
        for topic in np.argsort(-real, kind="stable")
    ]


Record = dict[str, object] | list[object]
"""A JSON object or array."""


def parsed_record(text: str) -> Record | None:
    """Return the JSON object or array that `text` is, or None."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


Parse = Callable[[str], Record | None]
"""`parsed_record`, or a cache of it."""


def structure(
    texts: Sequence[str], schema: Json | None, parse: Parse = parsed_record
) -> dict[str, float | None]:
    """Return `json_parse_share`, the share of texts that are one JSON object or array by the strict
    grammar (no NaN), and `schema_share`, the share that also fits `schema` (None without a schema).

    Raises InputError for a schema that is not valid or that points outside itself.
    """
    parsed = [value for value in map(parse, texts) if value is not None]
    return {
        "json_parse_share": len(parsed) / len(texts),
        "schema_share": None if schema is None else _fitting(parsed, schema) / len(texts),
    }


def _fitting(values: Sequence[Any], schema: dict[str, object]) -> int:
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
        # An empty registry: a `$ref` out of the schema is an error, never a network request.
        validator = kind(schema, registry=Registry())
        return sum(validator.is_valid(value) for value in values)
    except SchemaError as error:
        raise InputError(f"schema: not a JSON Schema, at {error.json_path}") from None
    except Unresolvable as error:
        raise InputError(f"schema: cannot resolve $ref {error.ref!r}") from None
