"""Aug-PE's run: one noisy vote an iteration, each published once; everything else is public.

The output of an iteration's vote is its checkpoint: the population and the NOISY votes. From the
last one a run goes on, with the same noise multiplier and the same charge; the calls of the
language model that were finished are in a cache by their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np

from dpray.config.config import Config
from dpray.engines.base import EngineError, TextGenerator
from dpray.engines.requests import Request
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE, Counts
from dpray.methods.aug_pe.algorithm import Checkpoint, Population, Progress
from dpray.methods.aug_pe.history import iteration_history
from dpray.methods.aug_pe.plan import AugPePlan
from dpray.methods.aug_pe.voters import Embeddings, Voters, total_votes
from dpray.runs.call_cache import CALLS, CallCache
from dpray.runs.engine_pool import on_pool
from dpray.runs.llm_calls import ask_cached
from dpray.runs.runner import Progress as Shown
from dpray.runs.runner import Run
from dpray.runs.shards import Shards


class AugPeRun(Run[AugPePlan]):
    _voters: Shards | None = None
    _engine: TextGenerator | None = None
    _iteration = "starting"

    def perform(self) -> None:
        checkpoints = self.checkpoints()
        if len(checkpoints) == self.plan.settings.iterations:
            return
        try:
            self.plan.method.run(
                self.plan.prompts,
                self._ask,
                self._embed,
                self._vote,
                self.salt,
                checkpoints[-1] if checkpoints else None,
                self._show,
            )
        except EngineError as error:
            raise self.unfinished(
                f"{error} ({len(self.checkpoints())} of {self.plan.settings.iterations} "
                f"iterations are done)"
            ) from None
        finally:
            self._close()

    @cached_property
    def cache(self) -> CallCache:
        return CallCache(self.folder.private / CALLS)

    def checkpoints(self) -> list[Checkpoint]:
        """Those of the iterations that are done, in order."""
        outputs = (
            self.folder.published_output(f"{_unit(t)}.json")
            for t in range(1, self.plan.settings.iterations + 1)
        )
        return [Checkpoint(**output) for output in outputs if output is not None]

    def _ask(self, requests: Sequence[Request]) -> list[str]:
        if self._engine is None:
            if on_pool(self.config):
                self._shards()  # before the engines hold the machines that read the records
            self._engine = self.open_generator(self._side_by_side)
        done = 0

        def on_completion() -> None:
            nonlocal done
            done += 1
            self.on_progress(Shown(f"{self._iteration}: LLM calls", done, len(requests)))

        return ask_cached(self._engine, self.cache, on_completion)(requests)

    def _embed(self, texts: Sequence[str]) -> Embeddings:
        vectors: Embeddings = np.concatenate(self._shards().spread("embed", texts))
        return vectors

    def _vote(
        self, t: int, population: Population, embeddings_ND: Mapping[str, Embeddings]
    ) -> Mapping[str, Counts]:
        def votes() -> dict[str, Any]:
            noisy = self._noisy(total_votes(self._shards(), embeddings_ND))
            counts = {label: noisy_N.tolist() for label, noisy_N in noisy.items()}
            return asdict(Checkpoint(t, population, counts))

        output = Checkpoint(**self.publish_once(_unit(t), votes))
        return {label: np.array(v, dtype=np.int64) for label, v in output.votes.items()}

    def _noisy(self, exact: dict[str, Counts]) -> dict[str, Counts]:
        """Noise once on every count of every label; none in a run that is not private."""
        if self.plan.votes is None:
            return exact
        noisy_N = self.plan.votes.noisy(np.concatenate(list(exact.values())))
        ends = np.cumsum([len(counts) for counts in exact.values()])
        return dict(zip(exact, np.split(noisy_N, ends[:-1]), strict=True))

    def _shards(self) -> Shards:
        if self._voters is None:
            self.on_progress(Shown("private embeddings"))
            # Where there are engines, the GPUs are theirs: they have more to do.
            gpus = 0.0 if on_pool(self.config) else self.config.runtime.gpus_per_actor
            self._voters = Shards(self._side_by_side, Voters, gpus or 0.0)
        return self._voters

    @property
    def _side_by_side(self) -> Config:
        """On Ray, engines and voters are there all the time and take turns, so that each gets half
        of an actor's CPUs by this configuration."""
        if not on_pool(self.config):
            return self.config
        runtime = self.config.runtime
        runtime = runtime.model_copy(update={"cpus_per_actor": runtime.cpus_per_actor / 2})
        return self.config.model_copy(update={"runtime": runtime})

    def _show(self, progress: Progress) -> None:
        self._iteration = f"iteration {progress.iteration} of {progress.iterations}"
        epsilon = "not private" if self.plan.not_private else f"eps {self.plan.cost.epsilon:.3f}"
        self.on_progress(
            Shown(
                f"{self._iteration}: {progress.doing}",
                progress.iteration - 1,
                progress.iterations,
                f"{progress.texts} texts, {epsilon} (charged)",
            )
        )

    def _close(self) -> None:
        if self._voters is not None:
            self._voters.close()
        if self._engine is not None:
            self._engine.close()
        self._voters = self._engine = None

    def released(self) -> Iterator[dict[str, Any]]:
        """The texts that the last vote kept: not the population it was held on."""
        kept = self.plan.method.kept(self.checkpoints()[-1], self.salt)
        for label, texts in kept.items():
            yield from ({"text": text, "label": label or None} for text in texts)

    def method_report(self) -> dict[str, Any]:
        settings = self.plan.settings
        method = self.plan.method
        noise = "get no noise" if self.plan.not_private else "get noise once, in one place"
        history = [
            iteration_history(checkpoint, method.kept(checkpoint, self.salt))
            for checkpoint in self.checkpoints()
        ]
        return {
            "calls": asdict(self.cache.totals()),
            "llm_calls": method.llm_calls,
            "noise_multiplier": self.plan.noise_multiplier,
            "iterations": history,
            "sampling": {
                "votes": "each private record votes once an iteration for the nearest text of its "
                f"label; all counts {noise}",
                "embeddings": "the private texts are read by the embedder and not by the language "
                "model; each is embedded by itself",
            },
            "public_inputs": {
                "template": settings.template,
                "embedder": self.config.embedder.model,
            },
            "noise_source": "none: this run is not private"
            if self.plan.not_private
            else INTEGER_NOISE_SOURCE,
        }


def _unit(t: int) -> str:
    return f"votes-{t:04d}"
