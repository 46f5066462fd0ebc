"""A preview: texts that a run's model writes from the public prompts alone.

It opens no data and no ledger. The same texts are the floor of an evaluation: they show what the
model writes without the private records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from time import monotonic

from dpray.config.config import Config, EngineConfig
from dpray.engines.base import Completion, Engine, EngineError
from dpray.engines.bits import bits_per_byte
from dpray.engines.kept_state import refuse_kept_state
from dpray.engines.model_path import resolve_model
from dpray.engines.rates import Rates, measure_rates, rates_of
from dpray.engines.requests import Request, written
from dpray.engines.sentences import PART_OF_CHARACTER, ended_text, is_cut_short
from dpray.engines.weights import loads_plainly
from dpray.extras import is_installed
from dpray.io.columns import cut_advice, is_code
from dpray.io.files import check_writable, write_durably
from dpray.io.languages import language_of
from dpray.io.public_files import read_few_shot
from dpray.mechanisms.labels import largest_remainder
from dpray.runs.forecast import Forecast, rates_here
from dpray.runs.plan import Plan, PublicCalls
from dpray.types import (
    InputError,
    Json,
    OnProgress,
    Progress,
    ReadOnlyJson,
    Resumable,
    valid_unicode,
)

FLOOR = "floor.jsonl"
"""The file in a run's folder with the texts of a preview, which are public."""

MOST_BITS = 1.8
"""A model that knows the language of a public text needs fewer bits for each of its bytes. SmolLM2
needs 1.14 in English, and from 2.10 (French) to 2.95 (Chinese) in others (docs/languages.md)."""

QUICK = "transformers"
"""The engine that starts quickly on a CPU."""

MEASURED = "as fast as this machine was just now"

USUAL = "at the usual speed of two CPU cores"

FEW = 8
"""The most texts that transformers writes in the place of vLLM (`takes_quick_start`)."""

HOT = 1.0
"""Above this temperature a small model draws words that it finds unlikely."""


def preview(
    plan: Plan, records: int, build: Callable[..., Engine], on_progress: OnProgress, write: bool
) -> Json:
    """Write `records` texts from the plan's public prompts, labels by their public shares, and
    return them with their lengths, times, a forecast of the run, and advice. With `write`, the
    texts are also written to `FLOOR` in the output folder. Raises InputError that names the key
    for a model that cannot be loaded or asked."""
    if records < 1:
        raise InputError("records: a preview has one text at least")
    config = plan.config
    labels = spread_labels(plan.proportions, records)
    calls = plan.public_calls(labels)
    if write:
        check_writable(Path(config.output.path) / FLOOR, "output.path")
    on_progress(Progress("loading the model"))
    began = monotonic()
    try:
        is_quick = takes_quick_start(config, records)
        with closing(plan.load_writer(quick_start(build) if is_quick else build)) as engine:
            loaded = monotonic()
            answers = documents(engine, calls, on_progress)
            seconds = monotonic() - loaded
            if is_quick or plan.work.train:
                rates, speed = rates_here(config), USUAL
                forecast = None if rates is None else Forecast.of(plan.work, rates, config)
            else:
                forecast = forecast_of(plan, calls.rows, engine, answers, seconds, on_progress)
                speed = MEASURED
            known = known_bits(plan, engine, on_progress)
    except (EngineError, Resumable) as error:
        raise InputError(str(error)) from None
    texts = [
        {
            "text": released_text(calls, answer, request),
            "label": config.data.released_label(label),
            "attributes": config.data.released_attributes(values) if values else {},
            "tokens": answer.completion_tokens,
            "cut": answer.finish_reason == "length",
        }
        for answer, label, request, values in zip(
            answers, labels, calls.requests, calls.attributes or [{}] * records, strict=True
        )
    ]
    prompt = calls.requests[0].prompt
    found = {
        "model": config.engine.model,
        "engine": QUICK if is_quick else config.engine.kind,
        "prompt": {"system": prompt.system, "user": prompt.user, "prefix": prompt.prefix},
        "texts": texts,
        "cut": sum(bool(each["cut"]) for each in texts),
        "empty": sum(not each["text"] for each in texts),
        "tokens_per_text": sum(answer.completion_tokens for answer in answers) / records,
        "seconds_per_text": seconds / records,
        "seconds_to_load": loaded - began,
        "forecast": forecast and asdict(forecast),
        "speed": speed,
        "tunes": bool(plan.work.train),
        "bits": known,
        "run": run_lines(plan, forecast),
        "warnings": plan.method_summary()["warnings"],
        "advice": advice(plan, calls, texts, known),
        "output": config.output.path,
        "floor": None,
    }
    if write:
        found["floor"] = str(write_floor(config, texts))
    return found


def takes_quick_start(config: Config, records: int) -> bool:
    """Return whether transformers writes the texts in the place of the run's own engine.

    On a CPU transformers starts in half the time of vLLM, and somebody waits for a few texts. They
    are drawn from the same model by the same rule. vLLM keeps models that transformers loads in
    another way or not at all: those that are quantised, of an architecture that it does not know,
    or refused for a state.
    """
    engine = config.engine
    if engine.kind != "vllm" or records > FEW or not is_installed("vllm"):
        return False
    if rates_here(config) is None:  # on a GPU, or the model is not on this machine
        return False
    folder = resolve_model(engine.model)
    try:
        refuse_kept_state(folder)
    except InputError:
        return False
    return loads_plainly(folder)


def quick_start(build: Callable[..., Engine]) -> Callable[..., Engine]:
    """Return the function that builds a transformers engine of a section for vLLM."""

    def built(engine: EngineConfig, **options: object) -> Engine:
        return build(engine.model_copy(update={"kind": QUICK}), **options)

    return built


def spread_labels(proportions: Mapping[str, float], records: int) -> list[str]:
    """Return `records` labels by their public shares, one of each in turn."""
    counts = largest_remainder(records, proportions)
    turns = zip_longest(*([label] * count for label, count in counts.items()))
    return [label for label in chain.from_iterable(turns) if label is not None]


def public_texts(
    engine: Engine, requests: Sequence[Request], on_progress: OnProgress
) -> list[Completion]:
    """Return the model's answers to requests without private records."""
    done = 0

    def on_completion(place: int, answer: Completion) -> None:
        nonlocal done
        done += 1
        on_progress(Progress("texts", done, len(requests)))

    on_progress(Progress("texts", 0, len(requests)))
    prompts, samplings = zip(*((each.prompt, each.sampling) for each in requests), strict=True)
    return engine.generate(prompts, samplings, on_completion)


def documents(engine: Engine, calls: PublicCalls, on_progress: OnProgress) -> list[Completion]:
    """Return the model's answers, those of several sections joined as a run joins them."""
    parts = [[each] for each in public_texts(engine, calls.requests, on_progress)]
    if calls.following is None or calls.joined is None or calls.sections == 1:
        return [each for [each] in with_endings(engine, calls, parts, on_progress)]
    for _ in range(calls.sections - 1):
        requests = [calls.following(n, _sections(each)) for n, each in enumerate(parts)]
        for written_parts, answer in zip(
            parts, public_texts(engine, requests, on_progress), strict=True
        ):
            written_parts.append(answer)
    parts = with_endings(engine, calls, parts, on_progress)
    return [
        Completion(
            calls.joined(_sections(each)),
            sum(part.prompt_tokens for part in each),
            sum(part.completion_tokens for part in each),
            "length" if any(is_cut for _, is_cut in _sections(each)) else "stop",
        )
        for each in parts
    ]


def with_endings(
    engine: Engine, calls: PublicCalls, parts: list[list[Completion]], on_progress: OnProgress
) -> list[list[Completion]]:
    """Return the sections of each text, those that were cut in a sentence ended as a run ends them
    once all are written."""
    if calls.ending is None:
        return parts
    found, asked = [[*each] for each in parts], dict[tuple[int, int], Request]()
    for n, each in enumerate(parts):
        for place, part in enumerate(each):
            before = part.text.rstrip(PART_OF_CHARACTER)  # a request has whole ones only
            is_cut = part.finish_reason == "length" and is_cut_short(before)
            if is_cut and (request := calls.ending(n, before)) is not None:
                asked[n, place] = request
    answers = public_texts(engine, [*asked.values()], on_progress) if asked else []
    for (n, place), answer in zip(asked, answers, strict=True):
        part = parts[n][place]
        before = part.text.rstrip(PART_OF_CHARACTER)
        text = ended_text(before, before + answer.text, answer.finish_reason == "stop")
        if text is not None:
            tokens = part.completion_tokens + answer.completion_tokens
            found[n][place] = Completion(text, part.prompt_tokens, tokens, "stop")
    return found


def released_text(calls: PublicCalls, answer: Completion, request: Request) -> str:
    """Return the text of an answer as a run releases it; sections that are joined were cut where
    their sentences end."""
    text = answer.text if calls.sections > 1 else written(answer, request)
    return valid_unicode(calls.released(text))


def _sections(parts: Sequence[Completion]) -> list[tuple[str, bool]]:
    return [(part.text, part.finish_reason == "length") for part in parts]


def forecast_of(
    plan: Plan,
    rows: int,
    engine: Engine,
    answers: Sequence[Completion],
    seconds: float,
    on_progress: OnProgress,
) -> Forecast | None:
    """Return a forecast of the plan's work on machines like this one; `rows` are those of a group
    of private prediction, which it is measured by. Other methods are measured by the calls of the
    preview: larger batches of calls are faster."""
    work, config = plan.work, plan.config
    if rows:
        on_progress(Progress("measuring the speed"))
        measure_rates(engine, rows)
        # On a busy machine more tokens may seem to take less time: that is no rate.
        rates = rates_of(engine) or rates_here(config)
    else:
        read = sum(answer.prompt_tokens for answer in answers)
        written = sum(answer.completion_tokens for answer in answers)
        rates = (
            Rates(read / seconds, written / seconds, together=True) if read and written else None
        )
    return None if rates is None else Forecast.of(work, rates, config)


def run_lines(plan: Plan, forecast: Forecast | None) -> dict[str, str]:
    """Return what the run costs and makes, and how long it takes: names and lines."""
    cost, records = plan.cost, plan.method_summary()["records"]
    price = "none, no noise is added"
    if not plan.config.not_private:
        price = f"epsilon {cost.epsilon:.4f}, delta {cost.delta:g}"
    lines = {"privacy": price, "texts": f"{records:,}"}
    return lines | (forecast.lines() if forecast else {})


def known_bits(plan: Plan, engine: Engine, on_progress: OnProgress) -> Json | None:
    """Return the bits that the model needs for a byte of a public text: of `method.few_shot`, or of
    a sentence in the language of data.language; None without one, and of an endpoint."""
    settings, data = plan.settings.each[-1], plan.config.data
    file, language = getattr(settings, "few_shot", None), language_of(data.language)
    if file is not None:
        shown = read_few_shot(file, getattr(settings, "few_shot_examples", 1), data.path)
        text, source = "\n".join(shown.texts[None]), "method.few_shot"
    elif language is not None and language.text:
        text, source = language.text, f"a public sentence in {language.name}"
    else:
        return None
    if not isinstance(engine, Engine):
        return None
    on_progress(Progress("reading a public text"))
    bits = bits_per_byte(engine, text)
    return None if bits is None else {"per_byte": bits, "of": source, "most": MOST_BITS}


def advice(
    plan: Plan,
    calls: PublicCalls,
    texts: Sequence[ReadOnlyJson],
    known: ReadOnlyJson | None,
) -> list[str]:
    """Return what to change, by key, from public texts and settings."""
    data, sampling = plan.config.data, calls.requests[0].sampling
    found, written = plan.language_advice(), [each["text"] for each in texts if each["text"]]
    if known is not None and known["per_byte"] > MOST_BITS:
        found.append(
            f"engine.model: the model needs {known['per_byte']:.2f} bits for a byte of "
            f"{known['of']}, and one that knows the language at most {MOST_BITS:g}; take a model "
            "that was trained on it"
        )
    if data.about is None and calls.says_about:
        found.append(
            "data.about: say what the texts are, such as `questions that people ask a "
            "counsellor online`; the prompts then say it"
        )
    codes = filter(is_code, data.label_names)
    if unsaid := [name for name in codes if name not in data.label_about]:
        found.append(
            f"data.label_about: the label {unsaid[0]} is a number; say what it means, such as "
            f"{{{unsaid[0]}: neoplasms}}"
        )
    share = sum(bool(each["cut"]) for each in texts) / len(texts)
    # How long the texts are, a training changes.
    cut = None if plan.work.train else cut_advice(share, plan.method_summary()["method"])
    if cut is not None:
        found.append(cut)
    if sampling.temperature > HOT and sampling.top_p == 1 and not sampling.top_k:
        found.append(
            f"method.temperature: {sampling.temperature:g} draws words that the model finds "
            "unlikely; try 0.8 to 1 if the texts do not hang together"
        )
    if len(texts) - len(written):
        found.append(
            f"method.template: {len(texts) - len(written)} of {len(texts)} answers are empty; "
            "another template or model may help"
        )
    if len({*written}) < len(written):
        found.append("method.temperature: some texts are the same; a higher one varies them")
    return found


def write_floor(config: Config, texts: Sequence[ReadOnlyJson]) -> Path:
    """Write the texts that are not empty, with their labels, and return the file."""
    path = Path(config.output.path) / FLOOR
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"text": each["text"], "label": each["label"]}, ensure_ascii=False) + "\n"
        for each in texts
        if each["text"]
    )
    write_durably(path, "".join(lines))
    return path
