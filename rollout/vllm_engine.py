"""The vLLM engine: the one file that imports vLLM.

It runs in this process, in a thread of its own that steps while requests are open: start-up takes 9 s on
a CPU where separate engine processes take 50. Commands queue up in order; an adapter waits for the requests
before it and holds those behind it, so no completion ever mixes two policy versions.
"""

import asyncio
import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.rollout import EngineConfig
from rollout.engine import BASE_VERSION, EngineError, GenerationRequest
from rollout.merging import AdapterMerger
from rollout.types import Completion

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@dataclass(slots=True)
class _Open:
    """A request inside vLLM, and where its completion goes."""

    trajectory_id: str
    future: Future[Completion]
    policy_version: int


@dataclass(frozen=True, slots=True)
class _Command:
    """Work for the engine's thread, and where its result goes."""

    work: Callable[[], Any]
    done: Future[Any]

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work())
        except Exception as error:
            self.done.set_exception(error)


class VllmEngine:
    """An `Engine` over vLLM, for a base model and the adapters trained on it.

    Adapter mode `merged` folds each version into the base weights (exactly W0 + scale * B A, computed from
    the untouched W0 every time); `native` gives each version a LoRA adapter of its own name.
    """

    def __init__(self, model_path: Path, config: EngineConfig, *, lora_rank: int, lora_scale: float, seed: int) -> None:
        self._model_path = model_path
        self._config = config
        self._lora_rank = lora_rank
        self._lora_scale = lora_scale
        self._seed = seed
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._next_id = 0
        self._version = BASE_VERSION
        self._lora_request: Any = None
        self._failure: BaseException | None = None
        self._closing = False
        self.sampled_tokens = 0
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()
        self._submit(lambda: None).result()

    # --- called from any thread -----------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that the next request will sample with."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        return (await self.generate_together([request]))[0]

    async def generate_together(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Sample several completions that enter the engine in this order, between the same two steps."""
        futures: list[Future[Completion]] = [Future() for _ in requests]

        def add() -> None:
            for request, future in zip(requests, futures, strict=True):
                self._add(request, future)

        self._submit(add)
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in futures)))

    def release(self, trajectory_id: str) -> None:
        """Drop what a trajectory that ended early still has open; nobody waits for it any more."""
        if any(entry.trajectory_id == trajectory_id for entry in list(self._open.values())):
            self._submit(lambda: self._abort(trajectory_id))

    async def load_adapter(self, version: int, adapter: bytes) -> str:
        """Drain, switch to `adapter`, and return the digest of what was loaded."""
        return await asyncio.wrap_future(self._submit(lambda: self._load(version, adapter)))

    async def load_base(self) -> None:
        """Sample with the untouched model again."""
        await asyncio.wrap_future(self._submit(self._unload))

    def close(self) -> None:
        """Finish what is open and end the thread."""
        if not self._closing:
            self._submit(self._stop)
            self._thread.join(timeout=60)

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        if self._failure is not None:
            raise EngineError(f"the engine stopped earlier: {self._failure!r}") from self._failure
        command = _Command(work=work, done=Future())
        self._commands.put(command)
        return command.done

    # --- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._merger = AdapterMerger(self._model_path, self._lora_scale)
            self._llm = _build_llm(self._model_path, self._config, self._lora_rank, self._seed)
            while not self._closing:
                self._take_commands()
                self._step()
        except BaseException as error:
            self._fail(error)
            logging.getLogger(__name__).exception("the engine stopped")

    def _take_commands(self) -> None:
        """Run what is queued; sleep on the queue while nothing is open."""
        while True:
            try:
                command = self._commands.get(block=not self._open)
            except queue.Empty:
                return
            command.run()
            if self._closing:
                return

    def _step(self) -> None:
        for output in self._llm.step():
            if output.finished:
                entry = self._open.pop(output.request_id)
                completion = _completion(output.outputs[0], entry.policy_version)
                self.sampled_tokens += len(completion.token_ids)
                entry.future.set_result(completion)

    def _add(self, request: GenerationRequest, future: Future[Completion]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._next_id += 1
        request_id = str(self._next_id)
        if not request.use_adapter and self._config.adapter_mode == "merged":
            future.set_exception(EngineError("a merged engine holds no frozen base weights to sample with"))
            return
        try:
            self._llm.add_request(
                request_id,
                {"prompt_token_ids": list(request.prompt_token_ids)},
                _sampling_params(request),
                lora_request=self._lora_request if request.use_adapter else None,
            )
        except Exception as error:
            # Whatever vLLM calls it, a refused request is its caller's fault, and the caller is waiting.
            future.set_exception(ValueError(f"vLLM refused the request: {error}"))
            return
        version = self._version if request.use_adapter else BASE_VERSION
        self._open[request_id] = _Open(trajectory_id=request.trajectory_id, future=future, policy_version=version)

    def _abort(self, trajectory_id: str) -> None:
        ids = [key for key, entry in self._open.items() if entry.trajectory_id == trajectory_id]
        self._llm.abort_request(ids)
        for key in ids:
            self._open.pop(key).future.set_exception(EngineError("the trajectory was released"))

    def _drain(self) -> None:
        while self._open:
            self._step()

    def _load(self, version: int, adapter: bytes) -> str:
        digest = hashlib.sha256(adapter).hexdigest()
        self._drain()
        if self._config.adapter_mode == "merged":
            self._reload(self._merger.merged_weights(adapter))
        else:
            self._lora_request = self._add_lora(version, digest, adapter)
        self._version = version
        return digest

    def _unload(self) -> None:
        self._drain()
        if self._config.adapter_mode == "merged":
            self._reload(self._merger.base_weights())
        self._lora_request = None
        self._version = BASE_VERSION

    def _reload(self, weights: Any) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        # Cached prefixes were computed with the old weights; this only takes effect while nothing runs.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after a weight update")

    def _add_lora(self, version: int, digest: str, adapter: bytes) -> Any:
        """A name, a path and an id of its own per version: vLLM keys its prefix cache by name and path."""
        from vllm.lora.request import LoRARequest

        folder = self._merger.write_adapter_folder(version, digest, adapter)
        request = LoRARequest(f"v{version}-{digest[:8]}", version + 1, str(folder))
        if not self._llm.add_lora(request):
            raise RuntimeError(f"vLLM refused adapter version {version}")
        return request

    def _stop(self) -> None:
        self._drain()
        self._closing = True

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for entry in self._open.values():
            entry.future.set_exception(EngineError(f"the engine stopped: {error!r}"))
        self._open.clear()
        while not self._commands.empty():
            self._commands.get().done.set_exception(EngineError(f"the engine stopped: {error!r}"))


def _build_llm(model_path: Path, config: EngineConfig, lora_rank: int, seed: int) -> Any:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(config.kv_cache_gib)))
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options: dict[str, Any] = {}
    if config.adapter_mode == "native":
        options |= {"enable_lora": True, "max_lora_rank": lora_rank, "max_loras": 4, "max_cpu_loras": 4}
    if config.device == "cuda":
        options["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    llm: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model_path),
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=seed,
            enforce_eager=config.device == "cpu",
            async_scheduling=False,
            enable_prefix_caching=True,
            block_size=32 if config.device == "cpu" else None,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
            disable_log_stats=True,
            **options,
        )
    )
    # Compiled in the background, a cached grammar is ready a step earlier or later by chance, and two runs
    # with one seed would batch differently.
    llm.engine_core.engine_core.structured_output_manager._use_async_grammar_compilation = False
    return llm


def _sampling_params(request: GenerationRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    grammar = StructuredOutputsParams(grammar=request.grammar) if request.grammar else None
    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        logprobs=0,
        structured_outputs=grammar,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: Any, policy_version: int) -> Completion:
    token_ids = tuple(output.token_ids)
    logprobs = tuple(step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True))
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=output.text,
        finish_reason="length" if output.finish_reason == "length" else "stop",
        policy_version=policy_version,
    )
