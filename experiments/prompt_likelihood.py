"""The likelihood of real texts to SmolLM2 after the public prompt of private prediction.

`python experiments/prompt_likelihood.py DATA...` prints nats a token of 24 test texts of each set:
without a word about the texts, with the words of first_release.py, and with three examples, which
the model wrote itself or which are public records.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import closing

import torch
from first_release import SETS
from runs import DATA, rows

from dpray.config.sections import EngineConfig
from dpray.engines.base import Prompt, Sampling
from dpray.engines.transformers import TransformersEngine
from dpray.io.public_files import FewShot
from dpray.io.template_file import About
from dpray.methods.private_prediction.prompts import PromptTemplate, load_template

LONGEST = 120


@torch.inference_mode()
def nats(engine: TransformersEngine, prompt: Prompt, text: str) -> tuple[float, int]:
    """Return the negative log-likelihood of a text after a prompt, and its tokens."""
    before, after = engine.encode(prompt), engine.ids(f" {text}")[:LONGEST]
    logits_TV = engine._model(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1]
    logs_TV = logits_TV.float().log_softmax(-1)
    return -float(logs_TV.gather(1, torch.tensor(after)[:, None]).sum()), len(after)


def main(sets: Sequence[str]) -> None:
    config = EngineConfig(kind="transformers", model="smollm2", max_model_len=1024)
    with closing(TransformersEngine(config)) as engine:
        for data in sets:
            words = SETS[data]
            said = load_template("texts", about=About(words.about, labels=words.label_about))
            test = random.Random(3).sample(rows(DATA / data / "test.jsonl"), 24)
            prompt = said.public_prompt("")
            wrote = engine.generate([prompt] * 16, [Sampling(40, 0.8, stop=("\n",))] * 16)
            own = [answer.text.strip() for answer in wrote if answer.text.strip()]
            public = [row["text"][:300] for row in rows(DATA / data / "public.jsonl")[:60]]
            forms: dict[str, tuple[PromptTemplate, FewShot]] = {
                "nothing": (load_template("texts"), FewShot()),
                "about": (said, FewShot()),
                "about, 3 own": (said, FewShot({None: own}, 3)),
                "about, 3 public": (said, FewShot({None: public}, 3)),
            }
            for name, (template, few_shot) in forms.items():
                total = tokens = 0.0
                for place, row in enumerate(test):
                    texts = few_shot.of_label("") if few_shot.shown else []
                    shown = random.Random(place).sample([*texts], few_shot.shown)
                    prompt = template.public_prompt(row["label"] or "", shown)
                    found, length = nats(engine, prompt, row["text"])
                    total, tokens = total + found, tokens + length
                print(f"{data}: {name} {total / tokens:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
