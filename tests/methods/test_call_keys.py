"""The keys that may change during a run shape no mechanism."""

from __future__ import annotations

import pytest

from dpray.config.sections import EngineConfig, MethodSettings
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.topics.settings import TopicsSettings

MECHANISMS: dict[type[MethodSettings], set[str]] = {
    AugPeSettings: {
        "name", "records", "iterations", "variations", "lookahead", "selection", "noise_multiplier",
        "terms",
    },
    DpKpsSettings: {
        "name", "vocabulary", "stop_words", "phrases_per_record", "vocabulary_size",
        "vocabulary_fdr",
        "sequence_length", "epsilon_vocabulary", "epsilon_kde", "estimator", "features", "noise",
        "sampling", "ensemble", "records", "temperature", "top_m", "threshold", "contrast",
        "bandwidth",
    },
    DpSgdSettings: {
        "name", "epochs", "batch_size", "clip_norm", "noise_multiplier", "checkpoint_steps",
        "spare_steps", "max_length", "control_columns", "control_values", "terms",
        "control_combinations",
        *TrainingSettings.model_fields,
    },
    PrivatePredictionSettings: set(PrivatePredictionSettings.model_fields) - {"preset"},
    TopicsSettings: set(TopicsSettings.model_fields),
}  # fmt: skip


@pytest.mark.parametrize("settings", MECHANISMS, ids=lambda kind: kind.__name__)
def test_a_key_shapes_a_mechanism_or_only_calls(settings: type[MethodSettings]) -> None:
    free = {key.removeprefix("method.") for key in settings.call_keys if "method." in key}
    # What is excluded, the preset's name, is in no run: the keys that it sets are.
    fields = {name for name, field in settings.model_fields.items() if not field.exclude}
    assert free | (MECHANISMS[settings] & fields) == fields
    assert free.isdisjoint(MECHANISMS[settings])


def test_a_model_that_reads_records_stays_the_one_that_it_is() -> None:
    engine = {f"engine.{key}" for key in EngineConfig.model_fields}
    assert PrivatePredictionSettings.call_keys == frozenset() == TopicsSettings.call_keys
    assert engine - DpSgdSettings.call_keys == {"engine.model"}
    assert (DpSgdSettings.calls_after, DpKpsSettings.calls_after) == ("model", "density")
    assert AugPeSettings.calls_after is None
