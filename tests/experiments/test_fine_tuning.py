"""Fine-tuned models: an encoder that classifies, a causal model that guesses the next word."""

import numpy as np
import pytest
import torch
from paper_evaluation.causal_lm import CausalLM
from paper_evaluation.fine_tuning import Encoder, Training, next_word_accuracy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from dpray.evaluation.downstream import Embedded, compare_downstream

from ..evaluation.test_evaluate import COMMON, WORDS, notes

FAST = Training(learning_rate=1e-2, epochs=8, batch_size=16, max_length=32)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A random BERT of one layer, whose words are those of the notes."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", *COMMON, *(word for own in WORDS.values() for word in own)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=34, pad_token_id=0,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    return str(folder)


def embedded(records):
    texts, labels = zip(*records, strict=True)
    return Embedded(np.array(texts, dtype=object), np.array(labels))


def test_an_encoder_is_a_classifier_beside_the_others(bert):
    encoder = Encoder(bert, FAST)
    made, train, test = (embedded(notes(160, seed)) for seed in (1, 2, 3))
    state = torch.random.get_rng_state()

    sets = {"synthetic": made, "ceiling": train}
    found = compare_downstream(sets, test, 2, encoder.fit, "fine-tuned")

    assert found["synthetic"]["accuracy"]["mean"] > 0.9
    assert found["ceiling"]["macro_f1"]["mean"] > 0.9
    assert found["floor"]["accuracy"]["mean"] == pytest.approx(0.5, abs=0.05)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_next_word_accuracy_is_that_by_hand(model_folder):
    lm = CausalLM(model_folder)
    rows = [lm.codec.ids(text) for text in ("the old bridge near Zürich", "café", "market shares")]

    right = count = 0
    with torch.inference_mode():
        for row in rows:
            for place in range(1, len(row)):
                logits = lm.model(input_ids=torch.tensor([row[:place]])).logits[0, -1]
                right += int(logits.argmax()) == row[place]
                count += 1

    assert next_word_accuracy(lm.model, rows, batch_size=2) == pytest.approx(right / count)
    # A model that is always right, and one that never is.
    spoken = {"right": 1.0, "wrong": 0.0}
    for kind, expected in spoken.items():
        assert next_word_accuracy(Parrot(kind == "right"), rows) == expected


class Parrot:
    """Knows the next token (the labels are the inputs), or takes the one after it."""

    device = torch.device("cpu")

    def __init__(self, right):
        self.right = right

    def __call__(self, input_ids, attention_mask):
        guessed = torch.roll(input_ids, -1, 1) + (not self.right)

        class Output:
            logits = torch.nn.functional.one_hot(guessed, 1024)

        return Output
