"""Texts that InvisibleInk's package `invink` makes of the private records, label by label.

Runs in an environment of its own (README.md beside it): it imports invink, and nothing of dpray.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from random import Random
from typing import Any

PRIVATE_PROMPTS = {"own": 7, "dpray": 16}
"""Private prompts of a text: the package's default, and as many as dpray's batches hold."""

TOKENS, DELTA = 48, 3e-5
EXAMPLES, LONGEST_EXAMPLE = 2, 500
"""Public texts of the label in a prompt, and characters of one."""

DESCRIPTION = (
    "Short news reports of the category {label}, in English, as news agencies write them: one "
    "paragraph of one to three sentences, without a title."
)
"""The public description of the data set that the README asks for."""

PROMPT = "Here are first paragraphs of news articles of the category {label}.\n\n{{}}Paragraph: "
REQUEST = "\n\nWrite the first paragraph of another news article of the category {label}."
PLACEHOLDER = "<the first paragraph of a news article of the category {label}>"
"""dpray's prompts, but for the first word of the answer, which the package cannot begin."""


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--texts", type=int, required=True)
    parser.add_argument("--prompts", choices=PRIVATE_PROMPTS, required=True)
    options = parser.parse_args()

    private, public = (by_label(options.data / f"{part}.jsonl") for part in ("private", "public"))
    of_label, size = options.texts // len(private), PRIVATE_PROMPTS[options.prompts]
    # One call has one description, so with examples there is a call for every second text.
    of_call = 2 if options.prompts == "dpray" else of_label
    made = []
    for number, label in enumerate(sorted(private)):
        short = [text for text in public[label] if len(text) < LONGEST_EXAMPLE]
        for start in range(0, of_label, of_call):
            seed = 1000 * number + start
            rows = private[label][start * size :][: of_call * size]
            shown = Random(seed).sample(short, EXAMPLES)
            prompts = with_examples(label, shown) if options.prompts == "dpray" else as_it_is(label)
            texts = generate(
                options, rows, num=of_call, batch_size=size + 1, random_seed=seed, **prompts
            )
            made += [{"text": text, "label": label} for text in texts]
    with open(options.out / "synthetic.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in made)


def by_label(path: Path) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        texts.setdefault(record["label"], []).append(record["text"])
    return texts


def as_it_is(label: str) -> dict[str, str]:
    return {"dataset_desc": DESCRIPTION.format(label=label)}


def with_examples(label: str, examples: list[str]) -> dict[str, str]:
    prompt, request = PROMPT.format(label=label), REQUEST.format(label=label)
    return {
        "dataset_desc": "".join(f"Paragraph: {' '.join(text.split())}\n\n" for text in examples),
        "prv_prompt": prompt + "{}" + request,
        "pub_prompt": prompt + PLACEHOLDER.format(label=label) + request,
    }


def generate(options: Any, rows: list[str], **more: Any) -> list[str]:
    """Return the texts of one call. Everything that is not named is the package's default; the
    call's `batch_size` counts the public prompt too."""
    import invink

    released = invink.generate(
        rows,
        options.model,
        epsilon=options.epsilon,
        delta=DELTA,
        max_toks=TOKENS,
        dtype="float32",
        device_map=-1,
        **more,
    )
    return list(released.texts)


if __name__ == "__main__":
    main()
