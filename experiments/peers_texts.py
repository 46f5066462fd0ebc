"""Texts that an epsilon pays for by InvisibleInk and by dpray's private prediction with the same
batch size, clip, temperature and length, for results_tables.md: plans, no texts."""

from __future__ import annotations

from peers_table import DELTA, NAME, TOKENS, invisibleink_clip
from runs import DATA, HERE
from sets import size

from dpray import plan
from dpray.methods.config import load_config

BATCH = 16
EPSILONS = (1.0, 2.0, 4.0, 8.0)


def planned(epsilon: float, batches: str) -> str:
    """Return the number of dpray's texts with InvisibleInk's clip."""
    settings = [
        f"data.path={DATA / NAME / 'private.jsonl'}",
        f"privacy.epsilon={epsilon:g}",
        f"privacy.delta={DELTA:g}",
        f"method.batches={batches}",
        f"method.batch_size={BATCH}",
        f"method.clip_bound={invisibleink_clip(BATCH, epsilon):.6f}",
        "method.temperature=1.0",
        f"method.max_tokens={TOKENS}",
        "method.texts=null",
    ]
    found = plan(load_config(HERE / "smollm2" / "private_prediction.yaml", settings))
    return f"{found.summary()['records']:,}"


def table() -> list[str]:
    """Return the section of the page."""
    batches = size(NAME) // BATCH
    rows = {
        "the clip": [f"{invisibleink_clip(BATCH, epsilon):.2f}" for epsilon in EPSILONS],
        "InvisibleInk": [f"{batches:,}" for _ in EPSILONS],
        "dpray, disjoint batches": [planned(epsilon, "disjoint") for epsilon in EPSILONS],
        "dpray, secret batches": [planned(epsilon, "poisson") for epsilon in EPSILONS],
    }
    return [
        f"## Texts that an epsilon pays for: {NAME}, {size(NAME):,} private records, "
        f"{TOKENS} tokens, s = {BATCH}",
        "",
        '`python experiments/make.py --only "Texts that"`; plans, no text was made. The clip is '
        "the one that InvisibleInk takes for its own epsilon at temperature 1; dpray has the same, "
        "with the temperature, batch size and length. InvisibleInk makes one text of a batch, and "
        "has as many as there are disjoint batches of the records; its epsilon does not cover how "
        "it cuts them (see above), and dpray's does.",
        "",
        "| | " + " | ".join(f"eps {epsilon:g}" for epsilon in EPSILONS) + " |",
        "|---|" + "---|" * len(EPSILONS),
        *(f"| {name} | " + " | ".join(values) + " |" for name, values in rows.items()),
    ]
