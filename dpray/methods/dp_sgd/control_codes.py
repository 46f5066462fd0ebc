"""A control code names the values of a text's control columns, and stands before it in training.

The values and their shares are public; the records are private. After DP-KPS or topics in a chain,
a code also names terms: in training the released terms that occur in the record, in a prompt those
of a released sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle

import numpy as np

from dpray.config.config import DataConfig, EngineConfig
from dpray.engines.model_path import resolve_model
from dpray.engines.text import TextCodec
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_sgd.algorithm import TextEncoder
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.dp_sgd.training.step import TrainingText
from dpray.types import InputError
from dpray.workers.rows import Row

TERMS = "Terms"
"""Terms have this name in a code."""


@dataclass(frozen=True)
class ControlCodes:
    """`names` gives each column's name in the code, in the code's order; `values` the public values
    of every column with their public shares; `sequences` the released sequences of terms, by label,
    or all under "" if the codes name no label. `words` gives words for values of a column."""

    names: Mapping[str, str]
    values: Mapping[str, Mapping[str, float]]
    sequences: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def with_sequences(
        self, sequences: Mapping[str, Sequence[Sequence[str]]], label_column: str | None
    ) -> ControlCodes:
        """Return these codes with the released sequences; each names a term once."""
        distinct = {
            label: [tuple(dict.fromkeys(terms)) for terms in of_label]
            for label, of_label in sequences.items()
        }
        if label_column not in self.names:
            distinct = {"": list(chain.from_iterable(distinct.values()))}
        return replace(self, sequences=distinct)

    def code(self, values: Mapping[str, str], terms: Sequence[str] = ()) -> str:
        """Return what stands before a text: `Business Type: Restaurants | Terms: pizza, wine` and a
        newline, or nothing."""
        shown = {column: self.words.get(column, {}).get(values[column]) for column in self.names}
        named = [
            f"{name}: {shown[column] or values[column]}" for column, name in self.names.items()
        ]
        if terms:
            named.append(f"{TERMS}: {', '.join(terms)}")
        return f"{' | '.join(named)}\n" if named else ""

    def fitting(
        self,
        values: Mapping[str, str],
        terms: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        max_length: int,
    ) -> str:
        """Return the code, without its last terms if they make it longer than
        `most_code_tokens(max_length)`: a rule on this text only."""
        most = most_code_tokens(max_length)
        while terms and len(encode(self.code(values, terms))) > most:
            terms = terms[:-1]
        return self.code(values, terms)

    def term_finder(self) -> Callable[[str], list[str]]:
        """Return a function that finds the first released terms in a text, no more than the longest
        sequence has."""
        sequences = list(chain.from_iterable(self.sequences.values()))
        terms = sorted(set(chain.from_iterable(sequences)))
        most, matcher = max(map(len, sequences), default=0), TermMatcher(terms)
        return lambda text: [terms[number] for number in matcher.first_terms(text, most)]

    def draw_terms(self, labels: Sequence[str], rng: np.random.Generator) -> list[Sequence[str]]:
        """Deal each text a sequence of its label, in a random order that repeats. `rng` is
        public."""
        turns = {
            label: cycle([of_label[place] for place in rng.permutation(len(of_label))])
            for label, of_label in self.sequences.items()
            if of_label
        }
        return [next(turns[label]) if label in turns else () for label in labels]

    def longest(self, length: Callable[[str], int], terms: Sequence[str] = ()) -> str:
        """Return the code with these terms that has the greatest `length`. It is found column by
        column: another code may be a little longer if a tokenizer joins neighbours."""
        longest = {column: next(iter(self.values[column])) for column in self.names}
        for column in self.names:
            tried = {value: longest | {column: value} for value in self.values[column]}
            lengths = {value: length(self.code(one, terms)) for value, one in tried.items()}
            longest[column] = max(lengths, key=lengths.__getitem__)
        return self.code(longest, terms)


def most_code_tokens(max_length: int) -> int:
    """Return the most tokens of a code with terms: half of `max_length`, less the start token."""
    return max_length // 2 - 1


def control_codes(data: DataConfig, settings: DpSgdSettings) -> ControlCodes:
    """Return the codes of the configured columns. Raises InputError that names the key."""
    names = settings.control_columns or ({data.label: data.label} if data.label else {})
    if data.attributes and data.label not in {None, *names}:
        raise InputError(
            "method.control_columns: has to name data.label, too, which is measured together with "
            "data.attributes"
        )
    names = names | {column: column for column in data.attributes if column not in names}
    joint = {column for values in settings.combinations for column, _ in values} & set(names)
    if data.label in joint:
        if data.label_proportions is not None:
            raise InputError(
                "method.control_combinations: have the label, whose shares data.label_proportions "
                "has too; give them in one place"
            )
        given = set(settings.shares[data.label])
        if wrong := given - set(data.label_names):
            raise InputError(f"method.control_combinations: {min(wrong)} is not one of data.labels")
        if missing := set(data.label_names) - given:
            raise InputError(
                f"method.control_combinations: no combination has the label {min(missing)}; give "
                "one, or leave the label out of data.labels"
            )
    others = set(names) - {data.label, *data.attributes}
    for column in sorted(others ^ (set(settings.shares) - (joint & {data.label}))):
        if column == data.label:
            why = f"{column} is data.label; its shares are data.label_proportions"
        elif column in data.attributes:
            why = f"{column} is one of data.attributes, whose shares are measured"
        elif column in others:
            why = f"gives no shares of the values of {column}, which is in method.control_columns"
        else:
            why = f"{column} is not in method.control_columns"
        raise InputError(f"method.control_values: {why}")
    equal = {
        column: dict.fromkeys(values, 1 / len(values))
        for column, values in data.public_values.items()
    }
    known = equal | ({data.label: data.proportions} if data.label else {}) | settings.shares
    words = {data.label: data.label_about} if data.label else {}
    return ControlCodes(names, {column: known[column] for column in names}, words=words)


def text_encoder(engine: EngineConfig, settings: DpSgdSettings) -> TextEncoder:
    """Return the encoder with the tokenizer of the base model."""
    codec = TextCodec(resolve_model(engine.model), engine.max_model_len)
    encode = partial(codec.first_ids, most=settings.max_length)
    return TextEncoder(encode, codec.start_id, codec.eos_ids[0], settings.max_length)


def unit_texts(
    rows: Iterable[Row], encoder: TextEncoder, codes: ControlCodes
) -> Iterator[tuple[str, int, TrainingText]]:
    """Encode records: yield each one's unit, its rank in that unit, and its text with its control
    code."""
    terms_in = codes.term_finder()
    for row in rows:
        terms = terms_in(row["text"])
        code = codes.fitting(row["columns"], terms, encoder.encode, encoder.max_length)
        yield row["unit"], row["rank"], encoder.training_text(code, row["text"])
