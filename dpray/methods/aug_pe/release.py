"""Aug-PE publishes one noisy vote per iteration; everything else is public.

The output of a vote is its checkpoint: the population and the NOISY votes. An interrupted run
continues from the last checkpoint, under the same charge.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from dpray.config.config import Config
from dpray.engines.base import Embeddings
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE
from dpray.mechanisms.term_matcher import count_words
from dpray.methods.aug_pe.algorithm import AugPeRun, Checkpoint, Population
from dpray.methods.aug_pe.plan import AugPePlan
from dpray.methods.aug_pe.prompts import Kind, VariationPrompts
from dpray.runs.privacy_report import Iteration, MethodPart
from dpray.runs.session import Release, Session
from dpray.workers.engine_pool import on_pool
from dpray.workers.shards import Shards, Voters, embedded, noisy_votes, voters_gpus

AugPeSession = Session[AugPePlan]

QUANTILES = (0.1, 0.5, 0.9)


def release(session: AugPeSession) -> Release:
    """Run Algorithm 1, and release the texts that the last vote kept."""
    session.plan = replace(session.plan, prompts=with_kinds(session))
    plan, done = session.plan, checkpoints(session)
    if len(done) < plan.settings.iterations:
        config = side_by_side(session.config)
        session.show("embedding records")
        # Voters start first, because an engine would hold the CPUs that read the records.
        with (
            session.voters(config, voters_gpus(config)) as voters,
            session.language_model(config) as ask,
        ):
            run = AugPeRun(
                plan.method,
                plan.prompts,
                ask,
                partial(embedded, voters, embedder=config.embedder),
                partial(dp_nn_histogram, session, voters),
                session.salt,
                session.show,
                plan.schema,
            )
            done = run.algorithm_1(done)
    kept = plan.method.kept(done[-1], session.salt)
    records = [each for key, texts in kept.items() for each in records_of(plan, key, texts)]
    return Release(records, report(session, done))


def with_kinds(session: AugPeSession) -> VariationPrompts:
    """Return the prompts with a kind of texts for each combination of attributes that is drawn for
    a label: as many of its texts are kept as were drawn, so that no vote changes the shares."""
    prompts, kinds = session.plan.prompts, dict[str, Kind]()
    if not session.config.data.attributes:
        return prompts
    for label, texts in session.plan.records_per_label.items():
        drawn = Counter(tuple(each.items()) for each in session.drawn_values(label, texts))
        for values, number in drawn.items():
            kinds[json.dumps([label, values])] = Kind(label, dict(values), number)
    return replace(prompts, kinds=kinds)


def records_of(plan: AugPePlan, key: str, texts: Sequence[str]) -> list[dict[str, object]]:
    data, kind = plan.config.data, plan.prompts.kinds.get(key)
    values = {} if kind is None else data.released_attributes(kind.attributes)
    label = data.released_label(plan.prompts.label_of(key))
    return [{"text": text, "label": label, **values} for text in texts]


def dp_nn_histogram(
    session: AugPeSession,
    voters: Shards[Voters],
    t: int,
    S: Population,
    phi_ND: Mapping[str, Embeddings],
) -> Checkpoint:
    """Hold the vote of iteration t and publish its checkpoint, both once."""
    vote = partial(noisy_checkpoint, session.plan, voters)
    return Checkpoint(**session.publish_once(vote_name(t), vote, t, S, phi_ND))


def noisy_checkpoint(
    plan: AugPePlan,
    voters: Shards[Voters],
    t: int,
    S: Population,
    phi_ND: Mapping[str, Embeddings],
) -> dict[str, object]:
    """Let every record vote for the nearest text of its label, whatever the text's attributes
    are."""
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for key in phi_ND:
        keys[plan.prompts.label_of(key)].append(key)
    candidates = {label: np.concatenate([phi_ND[key] for key in of]) for label, of in keys.items()}
    noisy = noisy_votes(voters, plan.votes, candidates)
    votes: dict[str, list[int]] = {}
    for label, of in keys.items():
        ends = np.cumsum([len(phi_ND[key]) for key in of])
        parts = np.split(noisy[label], ends[:-1])
        votes |= {key: part.tolist() for key, part in zip(of, parts, strict=True)}
    return asdict(Checkpoint(t, S, votes))


def vote_name(t: int) -> str:
    """Return the name of an iteration's vote in the ledger."""
    return f"votes-{t:04d}"


def checkpoints(session: AugPeSession) -> list[Checkpoint]:
    """Return the checkpoints of the finished iterations, in order."""
    iterations = range(1, session.plan.settings.iterations + 1)
    outputs = [session.published(vote_name(t)) for t in iterations]
    return [Checkpoint(**output) for output in outputs if output is not None]


def side_by_side(config: Config) -> Config:
    """Return the configuration with half of an actor's CPUs for engines and half for voters: on
    Ray, both exist all the time and take turns."""
    if not on_pool(config):
        return config
    runtime = config.runtime
    runtime = runtime.model_copy(update={"cpus_per_actor": runtime.cpus_per_actor / 2})
    return config.model_copy(update={"runtime": runtime})


def report(session: AugPeSession, done: Sequence[Checkpoint]) -> MethodPart:
    plan = session.plan
    noise = "get no noise" if plan.config.not_private else "get noise once, in one place"
    return MethodPart(
        calls=session.calls,
        llm_calls=plan.method.llm_calls,
        noise_multiplier=plan.noise_multiplier,
        iterations=[
            iteration_history(checkpoint, plan.method.kept(checkpoint, session.salt))
            for checkpoint in done
        ],
        sampling={
            "votes": "each private record votes in an iteration for the nearest text of its label; "
            f"all counts {noise}",
            "embeddings": "to vote, each private text is embedded by itself; the language model, "
            "which varies the texts that are voted on, reads none",
        },
        public_inputs={
            "template": plan.settings.template,
            "embedder": session.config.embedder.shown,
        },
        noise_source="none: this run is not private"
        if plan.config.not_private
        else INTEGER_NOISE_SOURCE,
    )


def iteration_history(checkpoint: Checkpoint, kept: Population) -> Iteration:
    """Return the concentration of the positive noisy votes, and the lengths of the kept texts.

    `top_tenth_share` is the share of the most voted tenth of the texts, 0.1 if all get equally
    many. `effective_texts` is the inverse of the sum of the squared shares.
    """
    votes_N = np.concatenate([np.array(v, dtype=np.float64) for v in checkpoint.votes.values()])
    shares_N = np.sort(np.maximum(votes_N, 0.0))[::-1]
    total = shares_N.sum()
    words = [count_words(text) for texts in kept.values() for text in texts]
    tenth = max(1, round(len(shares_N) / 10))
    return Iteration(
        iteration=checkpoint.iteration,
        population=len(votes_N),
        kept=len(words),
        top_tenth_share=float(shares_N[:tenth].sum() / total) if total else None,
        effective_texts=float(total**2 / (shares_N**2).sum()) if total else None,
        words={str(q): float(np.quantile(words, q)) for q in QUANTILES},
    )
