"""Texts that aug-pe's published code makes of the private records.

Runs in an environment of its own (README.md beside it): it runs aug-pe's `main.py` as it stands,
and imports nothing of dpray.
"""

from __future__ import annotations

import csv
import json
import os
import runpy
import sys
from argparse import ArgumentParser
from pathlib import Path

TEXTS, ITERATIONS, POPULATIONS = 100, 4, 2
"""As dpray's runs: each kept text and one variation of it make the next population."""

TOKENS, TEMPERATURE = 64, 1.0
EMBEDDER = "all-MiniLM-L6-v2"
PROMPT = "Write the first paragraph of a news article of the category {}."
START = "Paragraph:"
"""The two labels of a record, which are the prompt of a new text. Of three wordings that were tried
this one had the model write news."""


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--source", type=Path, required=True, help="a clone of aug-pe")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--embedder", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--noise", type=float, required=True)
    options = parser.parse_args()

    # aug-pe loads a model whose name holds no "gpt2" in float16, which is slow on a CPU, and takes
    # its embedder by a name from a list: so both lie under such names in the working folder.
    links = {"gpt2-smollm2": options.model, EMBEDDER: options.embedder}
    source, out = options.source.resolve(), options.out.resolve()
    for name, folder in links.items():
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(folder.resolve())
    write_private(options.data / "private.jsonl", out / "private.csv")
    os.chdir(out)
    let_faiss_count_on_a_cpu()
    sys.path.insert(0, str(source))
    sys.argv = ["main.py", *arguments(options.noise)]
    runpy.run_path(str(source / "main.py"), run_name="__main__")
    release(out / "result" / f"{ITERATIONS}" / "samples.csv", out / "synthetic.jsonl")


def arguments(noise: float) -> list[str]:
    """Return the options of aug-pe's own script for small models, but for those sizes that dpray's
    runs share. Without its subcategories, which are the Yelp data's."""
    values = {
        "train_data_file": "private.csv",
        "dataset": "yelp",  # the one of its three formats with two labels
        "api": "HFGPT",
        "model_type": "gpt2-smollm2",
        "noise_multiplier": noise,
        "num_samples_schedule": POPULATIONS * TEXTS,
        "combine_divide_L": POPULATIONS,
        "init_combine_divide_L": POPULATIONS,
        "variation_degree_schedule": 0.5,
        "mlm_probability": 0.5,
        "variation_type": "yelp_rephrase_tone",
        "lookahead_degree": 0,
        "epochs": ITERATIONS,
        "select_syn_mode": "rank",
        "feature_extractor": EMBEDDER,
        "length": TOKENS,
        "temperature": TEMPERATURE,
        "random_sampling_batch_size": 32,
        "variation_batch_size": 32,
        "result_folder": "result",
    }
    return [
        "--do_sample",
        *(word for name, value in values.items() for word in (f"--{name}", f"{value}")),
    ]


def write_private(source: Path, target: Path) -> None:
    """Write the records in aug-pe's format."""
    with open(target, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label1", "label2"])
        for line in source.read_text().splitlines():
            record = json.loads(line)
            writer.writerow([record["text"], PROMPT.format(record["label"]), START])


def let_faiss_count_on_a_cpu() -> None:
    """Give faiss-cpu the one name of faiss-gpu that aug-pe asks for on every machine, and does not
    use where there is no GPU."""
    import faiss

    if not hasattr(faiss, "StandardGpuResources"):
        faiss.StandardGpuResources = object


def release(source: Path, target: Path) -> None:
    """Write the texts that the last vote selected."""
    before, after = PROMPT.split("{}")
    with open(source, newline="") as file, open(target, "w") as out:
        for row in csv.DictReader(file):
            label = row["label1"].removeprefix(before).removesuffix(after)
            out.write(json.dumps({"text": row["text"], "label": label}) + "\n")


if __name__ == "__main__":
    main()
