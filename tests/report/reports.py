"""Files of a run and its evaluation, from which the page is written."""

ATTACK = (
    "<script>document.title='owned'</script><img src=https://evil.example/x onerror=alert(1)>"
    '</blockquote>{{ 7 * 7 }} & "quoted" it\'s'
)
ACCURACY = {"mean": 0.8125, "deviation": 0.0125}
ROW = {"accuracy": ACCURACY, "macro_f1": ACCURACY, "train_records": 412}
LENGTHS = {"mean": 41.5, "quantiles": {"0.05": 12.0, "0.5": 38.0, "0.95": 88.0}}


def _cost(rho):
    return {"epsilon_alone": 3.9, "delta": 1e-6, "bound": "zcdp", "zcdp_rho": rho}


def a_report(**changes):
    """The JSON of a report as dpray 0.1.0 wrote it, with the repeats of later ones."""
    report = {
        "epsilon": 3.98765,
        "delta": 1e-6,
        "neighboring_relation": "add_or_remove_one",
        "privacy_unit": "patient (column patient_id)",
        "contribution_bound": 3,
        "accountant": {
            "name": "dpray over dp-accounting",
            "version": "0.6.0",
            "bound": "Canonne et al. 2020, Theorem 1",
        },
        "mechanisms": [
            {
                "name": "exponential_mechanism",
                "parameters": {"clip_bound": 10.0, "batch_size": 255, "temperature": 2.0},
                "count": 2600,
                "cost": _cost(0.49981),
            },
            {
                "name": "above_threshold",
                "parameters": {"threshold": 0.5, "noise": 0.2},
                "count": 2600,
                "cost": _cost(0.0021),
            },
        ],
        "sampling": {"batches": "records are hashed to batches by unit id; no amplification"},
        "tuning_cost": "none: parameters were chosen on public data",
        "public_inputs": {"labels": ["cardiology", "dermatology"], "public_size": 4000},
        "noise_source": "ChaCha20 keyed with 256 bits from the operating system",
        "not_covered": [
            "Timing: how long a batch takes is not protected.",
            "Floating point: real-valued noise is drawn in float64.",
        ],
        "not_private": False,
        "batches": {"total": 32, "published": 31, "repeated": 2, "failed": 1},
        "ledger": {
            "url_kind": "sqlite",
            "dataset": "clinic-notes",
            "budget": {"epsilon": 10.0, "delta": 1e-5},
            "spent": {"epsilon": 5.98765, "delta": 2e-6},
            "left": {"epsilon": 4.01235, "delta": 8e-6},
            "reservation": "run-5f1c9a",
        },
        "records": 1412,
        "repeats": {
            "count": 2,
            "lost_starts": {"the loss of a machine": 3, "an interruption": 1},
            "only_after": ["an interruption", "the loss of a machine"],
        },
        "method": {
            "name": "private_prediction",
            "batches": "disjoint",
            "batch_size": 255,
            "private_tokens": 2600,
        },
        "versions": {"dpray": "0.1.0", "vllm": "0.32.0"},
    }
    return report | changes


APART = {
    "synthetic_to_real": {"mean": 0.271, "deviation": 0.01},
    "real_to_real": {"mean": 0.083, "deviation": 0.02},
}


def an_evaluation():
    return {
        "private": "computed from private data; not for release",
        "test_records": 777,
        "downstream": {
            "classifier": "logistic regression on embeddings",
            "seeds": 5,
            "synthetic": ROW,
            "ceiling": ROW,
            "floor": ROW | {"kind": "majority class"},
        },
        "lengths": {
            "unit": "words",
            "real": LENGTHS,
            "synthetic": LENGTHS,
            "wasserstein": {
                "synthetic_to_real": {"mean": 3.5, "deviation": 0.1},
                "real_to_real": {"mean": 0.7, "deviation": 0.1},
                "sample_size": 300,
            },
        },
        "structure": {
            "real": {"json_parse_share": 1.0, "schema_share": None},
            "synthetic": {"json_parse_share": 0.913, "schema_share": None},
        },
        "columns": {
            "sample_size": 300,
            "seeds": 5,
            "one_way": {"age": APART, "route": APART},
            "pairs": [APART | {"columns": ["age", "route"]}],
        },
        "personal_data": {
            "texts": 1412,
            "texts_with_matches": 5,
            "matches": {"URLs": 4, "IBANs": 0, "phone numbers": 2},
        },
    }


RUN = {
    "config": {
        "data": {"path": "/srv/secret-place/notes.jsonl", "labels": ["cardiology", "dermatology"]},
        "privacy": {"ledger": "postgresql://user:hunter2@ledger.internal/dp"},
        "method": {"name": "private_prediction", "batch_size": 255},
        "engine": {"kind": "openai", "model": "google/gemma-3-1b-it", "api_key": "sk-hunter3"},
        "runtime": {"ray_address": "ray://10.0.0.7:10001"},
    }
}
SAMPLES = [
    {"text": "The patient reports chest pain on effort.\nECG normal.", "label": "cardiology"},
    {"text": ATTACK, "label": "<b>dermatology</b>"},
    {"text": '{"title": "A rash", "year": 2021}', "label": None, "batch": 3},
]
