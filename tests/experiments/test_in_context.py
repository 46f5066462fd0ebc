"""In-context learning: likelihoods against the plain computation, calibration by hand, draws."""

import numpy as np
import pytest
import torch
from paper_evaluation.causal_lm import CausalLM
from paper_evaluation.in_context import (
    ANSWER_TOKENS,
    InContextExtractor,
    calibrated,
    compare_in_context,
    word_f1,
)

from dpray.engines.base import Completion


@pytest.fixture(scope="module")
def lm(model_folder):
    return CausalLM(model_folder)


def plain_log_likelihood(lm, prompt, answer):
    """Without a cache, without padding, one text at a time."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        logits = lm.model(input_ids=ids).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))


def test_log_likelihoods_are_those_of_the_plain_computation(lm):
    prefix = lm.ids("market shares fell on Monday")
    queries = [lm.ids(f" the bridge {'near the old café ' * (i % 5)}") for i in range(20)]
    answers = [lm.ids(" cough"), lm.ids(" fever after two"), lm.ids(" naïve café owners said")]
    lengths = {len(answer) for answer in answers}
    assert 1 in lengths and len(lengths) == 3

    found = lm.log_likelihoods(prefix, queries, answers)

    start = lm.codec.start_id
    expected = [
        [plain_log_likelihood(lm, (start, *prefix, *query), answer) for answer in answers]
        for query in queries
    ]
    assert found == pytest.approx(np.array(expected), abs=1e-3)
    assert np.ptp(found, axis=0).min() > 0.1, "the queries matter"


def test_calibration_by_hand():
    p = np.array([[0.6, 0.3, 0.1], [0.5, 0.25, 0.25]])
    free = np.array([[0.9, 0.05, 0.05], [0.7, 0.15, 0.15]])  # means 0.8, 0.1, 0.1

    found = calibrated(p, free)

    exact = np.exp([[0.75, 3.0, 1.0], [0.625, 2.5, 2.5]])
    assert found == pytest.approx(exact / exact.sum(axis=1, keepdims=True))
    assert found.argmax(axis=1)[0] == 1 and p.argmax(axis=1)[0] == 0
    # A model that answers alike whatever it is asked says nothing after calibration.
    assert calibrated(free[:1], free[:1])[0] == pytest.approx([1 / 3] * 3)


class Copies:
    """An engine that answers with the last demonstration's phrase, then writes on."""

    context_length = 300
    prompts: list

    def encode(self, prompt):
        return tuple(range(len(prompt.user.split())))

    def truncate(self, text, max_tokens):
        return " ".join(text.split()[:max_tokens])

    def generate(self, prompts, samplings, on_completion=None):
        self.prompts = [prompt.user for prompt in prompts]
        assert all(each.temperature == 0.0 and each.stop == ("\n",) for each in samplings)
        found = []
        for prompt in self.prompts:
            answers = [line[8:] for line in prompt.split("\n") if line.startswith("Answer: ")]
            found.append(Completion(f" {answers[-1] if answers else 'nothing'}", 1, 1))
        return found


def test_extraction_through_an_engine():
    engine = Copies()
    test = [(f"a film by Jane\nDoe {i}", "Jane Doe") for i in range(300)]
    sets = {
        "synthetic": [("one by John Doe", "John Doe")] * 30,
        "ceiling": [("one by Jane Doe", "jane  doe")] * 70,
    }

    found = compare_in_context(InContextExtractor(engine), sets, test, seeds=2)

    assert found["task"] == "extraction" and found["test_records"] == 250
    zero, four, _, most = found["rows"]
    assert zero["synthetic"] == zero["ceiling"] and zero["ceiling"]["fitted"] == 0
    assert four["ceiling"]["exact_match"] == {"mean": 1.0, "deviation": 0.0}
    assert four["synthetic"]["exact_match"]["mean"] == 0.0
    assert four["synthetic"]["word_f1"]["mean"] == pytest.approx(0.5)
    assert four["synthetic"]["fitted"] == 4
    assert 16 < most["ceiling"]["fitted"] < 64, "the context has no room for all"
    longest = max(len(prompt.split()) for prompt in engine.prompts)
    assert 200 < longest <= engine.context_length - ANSWER_TOKENS
    assert all("Text: a film by Jane Doe" in prompt for prompt in engine.prompts), "on one line"


def test_word_f1_is_of_words_in_any_order():
    assert word_f1(["a", "b", "b"], ["b", "a", "b"]) == 1.0
    assert word_f1(["a", "b", "b", "c"], ["b", "d"]) == pytest.approx(2 * 1 / 6)
    assert word_f1([], ["a"]) == 0.0
