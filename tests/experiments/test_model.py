"""The packaged model: it loads, it is small, it writes known words, it copies from its prompt."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from clinic_notes import LABELS, public_notes
from demo_model import TrainingPlan, prompt, train
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpray.demo
from dpray.types import Progress

MODEL = Path(dpray.demo.__file__).parent / "model"
DATA = MODEL.parent / "data"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def private_texts(label: str) -> list[str]:
    notes = map(json.loads, (DATA / "private.jsonl").read_text().splitlines())
    return [note["text"] for note in notes if note["label"] == label]


def log_likelihood(model, tokenizer, start: str, text: str) -> float:
    """Mean nats a token of `text` and the end after `start`."""
    head = [tokenizer.bos_token_id, *tokenizer(start, add_special_tokens=False)["input_ids"]]
    tail = tokenizer(" " + text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([head + tail])).logits[0, len(head) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tail)[:, None]).mean().item()


def test_the_model_is_small_and_in_the_usual_layout() -> None:
    assert {path.name for path in MODEL.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 8_000_000


@pytest.mark.parametrize("text", ["Home visit in May.", "naïve ☃ 12/80\n\ttabs", "a" * 3000])
def test_the_tokenizer_gives_any_text_back(tokenizer, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id not in ids


@pytest.mark.parametrize("label", LABELS)
def test_a_private_example_makes_private_notes_likelier(model, tokenizer, label: str) -> None:
    """Nats a token gained over the placeholder; an example of another clinic is the control."""
    texts = private_texts(label)[:120]
    examples, notes = texts[::2], texts[1::2]
    others = [note.text for note in public_notes(400, random.Random(6)) if note.label == label]

    bare = [log_likelihood(model, tokenizer, prompt(label, None), note) for note in notes]

    def gains(shown: list[str]) -> torch.Tensor:
        prompts = (prompt(label, example) for example in shown)
        pairs = zip(prompts, notes, strict=True)
        likely = [log_likelihood(model, tokenizer, start, note) for start, note in pairs]
        return torch.tensor(likely) - torch.tensor(bare)

    private, control = gains(examples), gains(others[: len(notes)])
    assert private.mean() > 0.05
    assert private.mean() > 3 * private.std() / len(notes) ** 0.5
    assert private.mean() > control.mean() + 0.1


@pytest.mark.slow
def test_the_model_writes_known_words_and_stops(model, tokenizer) -> None:
    torch.manual_seed(0)
    notes = " ".join(note.text for note in public_notes(3000, random.Random(5)))
    known = set(re.findall(r"[\w'-]+", notes))
    for label in LABELS:
        ids = tokenizer(prompt(label, None), return_tensors="pt")["input_ids"]
        start = torch.cat([torch.full((1, 1), tokenizer.bos_token_id), ids], dim=1)
        written = model.generate(
            start, do_sample=True, top_k=0, max_new_tokens=96, num_return_sequences=40
        )[:, start.shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        words = re.findall(r"[\w'-]+", " ".join(texts))
        assert sum(word in known for word in words) / len(words) > 0.98
        assert (written == tokenizer.eos_token_id).any(dim=1).float().mean() > 0.95


@pytest.mark.slow
def test_training_is_reproducible(tmp_path: Path) -> None:
    plan = TrainingPlan(documents=20, words=200, phrases=20, hidden_size=32, layers=1, heads=2)
    losses: list[list[float]] = []
    for name in ("one", "two"):
        steps: list[Progress] = []
        train(plan, tmp_path / name, steps.append)
        losses.append([float(step.detail.removeprefix("loss ")) for step in steps])
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
