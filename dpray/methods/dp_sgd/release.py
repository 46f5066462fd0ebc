"""DP-SGD's run: train, in blocks of steps that are charged before they are made; publish the model
once; then let it write.

The unit `model` of the charge is the training as a whole: its output holds the SHA-256 of every
file of the model that is released. Each block of steps is a unit of its own beside it, and says
from where a training that was cut off goes on, and what it pays for again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dpray.engines.base import EngineError
from dpray.engines.text import TextCodec
from dpray.io.files import sha256_of, sync
from dpray.mechanisms.randomness import NOISE_SOURCE, generator, named_key
from dpray.methods.dp_sgd.control_codes import draw_values
from dpray.methods.dp_sgd.data import check_rows, load_units, with_absolute_paths
from dpray.methods.dp_sgd.generation import to_record, write_texts
from dpray.methods.dp_sgd.plan import DpSgdPlan, check_lengths
from dpray.methods.dp_sgd.progress import Watched
from dpray.methods.dp_sgd.repeats import charge_again, with_repeats
from dpray.runs import cluster
from dpray.runs.call_cache import CALLS, CallCache
from dpray.runs.engine import check_loads
from dpray.runs.llm_calls import ask_cached
from dpray.runs.placement import gpus_of_rank
from dpray.runs.runner import Progress, Run
from dpray.training.gradient_noise import SUM_ROUNDING
from dpray.training.journal import Journal, lost_blocks, nothing
from dpray.training.model import ADAPTER, Tuning, load_loss
from dpray.training.training import Training, train_here
from dpray.types import DprayError, Resumable

MODEL = "model"
"""The unit, and the folder of the release."""


class DpSgdRun(Run[DpSgdPlan]):
    _records: list[dict[str, Any]]

    def _check_models(self) -> None:
        """A model that cannot be tuned should cost nothing. An engine that cannot load the tuned
        one costs nothing either: the tuned model is kept, and its texts are free."""
        check_loads(self.config, partial(load_loss, self._tuning))

    def perform(self) -> None:
        if self.published(MODEL) is None:
            if cluster.is_local(self.config):
                check_lengths(self.config, self.plan.codes)
            if not self._has_begun():
                check_rows(self.config, self.plan.codes)
        self._files: dict[str, str] = self.publish_once(MODEL, self._trained)["files"]
        self._records = self._written()

    @property
    def _work(self) -> Path:
        """Where the model is until it is released: merged, for the engine."""
        return self.folder.private.resolve() / MODEL

    @property
    def _checkpoints(self) -> Path:
        return self.folder.private.resolve() / "checkpoints"

    @property
    def _scratch(self) -> Path:
        return self.folder.private.resolve() / "ray_train"

    @property
    def _tuning(self) -> Tuning:
        settings = self.plan.settings
        return Tuning(
            with_absolute_paths(self.config).engine.model,
            settings.tuning,
            settings.lora_rank,
            settings.lora_alpha,
            settings.precision,
            settings.gradient_checkpointing,
            name=self.config.engine.model,
        )

    def _trained(self) -> dict[str, Any]:
        """Make all steps that are not made yet; the released files by name, with their SHA-256."""
        self._pay_for_lost_blocks()
        shutil.rmtree(self._work, ignore_errors=True)
        if self.in_process:
            train_here(self._training(self._show))
        else:
            self._train_on_ray()
        _flush(self._work)
        return {"files": _hashes(self._released_model())}

    def _pay_for_lost_blocks(self) -> None:
        if self.ledger is not None:
            charge_again(self.ledger, self.id, self.plan, lost_blocks(self.ledger, self.id))

    def _training(self, on_step: Any) -> Training:
        settings, config = self.plan.settings, with_absolute_paths(self.config)
        return Training(
            plan=self.plan.method,
            tuning=self._tuning,
            zero_stage=settings.zero_stage,
            load_units=partial(load_units, config, self.plan.codes),
            folder=str(self._work),
            journal=Journal(
                self.ledger,
                self.id,
                self.attempt_id,
                str(self._checkpoints),
                self.plan.blocks,
                on_step,
            ),
        )

    def _train_on_ray(self) -> None:
        # Imported late: training here has no need of Ray Train and DeepSpeed.
        from dpray.training.ray_train import train_on_ray

        runtime = self.config.runtime
        with Watched(self.ledger, self.id, self._show):
            try:
                train_on_ray(
                    self._training(nothing),
                    workers=runtime.actors,
                    scratch=str(self._scratch),
                    gpus_per_worker=gpus_of_rank(runtime.gpus_per_actor or 0.0),
                    cpus_per_worker=runtime.cpus_per_actor,
                )
            except Exception as error:
                # Unlike what else is repeated, steps are paid for again: nothing has to fail.
                if cluster.ended_for_memory(error):
                    raise self.unfinished("Ray ended a rank for want of memory") from error
                raise

    def _show(self, t: int) -> None:
        epsilon = "not private" if self.plan.not_private else f"eps {self.plan.cost.epsilon:.3f}"
        self.on_progress(
            Progress("training steps", t, self.plan.method.steps, f"{epsilon} charged")
        )

    def _released_model(self) -> Path:
        return self._work / ADAPTER if self.plan.settings.tuning == "lora" else self._work

    def _written(self) -> list[dict[str, Any]]:
        wanted = draw_values(
            self.plan.shares,
            self.plan.settings.records,
            generator(named_key(self.salt, "control-values")),
        )
        if _hashes(self._released_model()) != self._files:
            raise DprayError("private/model: the tuned model is not there, or altered")
        texts = self._texts(wanted)
        pairs = zip(texts, wanted, strict=True)
        return [to_record(text, v, self.config.data.label) for text, v in pairs if text]

    def _texts(self, wanted: Sequence[Mapping[str, str]]) -> list[str]:
        done = 0

        def on_completion() -> None:
            nonlocal done
            done += 1
            self.on_progress(Progress("texts", done, len(wanted)))

        tuned = self.config.engine.model_copy(update={"model": str(self._work)})
        encode = TextCodec(tuned.model, tuned.max_model_len).encode
        engine = self.open_generator(self.config.model_copy(update={"engine": tuned}))
        try:
            ask = ask_cached(engine, self.cache, on_completion)
            return write_texts(encode, ask, self.plan.settings, self.plan.codes, wanted)
        except EngineError as error:
            raise self.unfinished(str(error)) from None
        finally:
            engine.close()

    @cached_property
    def cache(self) -> CallCache:
        return CallCache(self.folder.private / CALLS)

    def unfinished(self, why: str) -> Resumable:
        if self.plan.not_private or self.folder.published_output(f"{MODEL}.json") is not None:
            return super().unfinished(why)
        return Resumable(
            f"{why}; the same command goes on from the last checkpoint: the steps after it, "
            f"{self.plan.blocks.size} at most, are charged again"
        )

    def released(self) -> Iterator[dict[str, Any]]:
        yield from self._records

    def _report(self, records: int) -> dict[str, Any]:
        """For all steps that were charged, those made again too; and the model beside it."""
        if self.ledger is not None:
            self.plan = with_repeats(self.plan, lost_blocks(self.ledger, self.id))
        report = super()._report(records)
        if not self.plan.not_private:
            report["not_covered"].append(SUM_ROUNDING)
        self._release_model(report)
        return report

    def _release_model(self, report: dict[str, Any]) -> None:
        """The folder `model`, whole or not at all, with the report inside: it travels alone."""
        target, staged = self.folder.root / MODEL, self.folder.private / "released_model"
        for place in (target, staged):
            shutil.rmtree(place, ignore_errors=True)
        staged.mkdir()
        for name in self._files:
            shutil.copyfile(self._released_model() / name, staged / name)
        self.folder.write_json(f"private/{staged.name}/privacy_report.json", report)
        _flush(staged)
        staged.replace(target)

    def method_report(self) -> dict[str, Any]:
        method, ledger = self.plan.method, self.ledger
        repeated = 0 if ledger is None else sum(lost_blocks(ledger, self.id))
        return {
            "calls": asdict(self.cache.totals()),
            "llm_calls": self.plan.settings.records,
            "noise_multiplier": self.plan.noise_multiplier,
            "model": self._files,
            "steps": {
                "planned": method.steps,
                "repeated": repeated,
                "charged": method.steps + method.repeats,
            },
            "sampling": {
                "batches": "Poisson: every unit joins a step's batch with probability "
                f"{method.mechanism.sampling_probability:g}, independently, and brings one record",
                "control_values": {name: dict(s) for name, s in self.plan.shares.items()},
                "texts": "ordinary sampling from the tuned model: post-processing",
            },
            "noise_source": "none: this run is not private"
            if self.plan.not_private
            else f"{NOISE_SOURCE}; rounded to float32",
        }

    def _finish(self) -> dict[str, Any]:
        report = super()._finish()
        for place in (self._work, self._checkpoints, self._scratch):
            shutil.rmtree(place, ignore_errors=True)
        return report


def _flush(folder: Path) -> None:
    """To the disk: from here on the ledger says that these files are there."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the folder's own files."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return {path.name: sha256_of(path) for path in files}
