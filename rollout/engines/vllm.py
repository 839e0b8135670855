"""The vLLM engine. One thread owns vLLM; other threads queue work for it, and versions change between two steps."""

import asyncio
import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.chat import reply_ends
from rollout.engines.adapters import AdapterMerger, NativeAdapters
from rollout.engines.engine import BASE_VERSION, Commands, EngineError, EngineLoad, GenerationRequest, Pulse
from rollout.engines.read_back import MergedColumns, ReadBack
from rollout.engines.vllm_parts import OpenRequest, build_llm, completion_of, free_memory, sampling_params
from rollout.model_files import check_weights
from rollout.types import Completion

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.lora.request import LoRARequest

    from rollout.engines.base_weights import ExportedBase


class VllmEngine:
    """An `Engine` over vLLM that follows the policy in training, for a base model and the adapters trained on it.

    Adapter mode `merged` folds each version into the base weights (exactly W0 + scale * B A, always computed from the
    untouched W0). Mode `native` loads each version as a LoRA adapter of vLLM under its own name.
    """

    def __init__(
        self,
        model_path: Path,
        config: EngineConfig,
        model: ModelConfig,
        *,
        seed: int,
        in_lockstep: bool = False,
        base: "ExportedBase | None" = None,
    ) -> None:
        """Start the engine's thread and wait until vLLM has loaded the model.

        `seed` is for requests without one. `in_lockstep`: every step must have the same requests in every run. `base`
        weights of another process are used in place, in mode `native` only, since merging would write to them.
        """
        check_weights(model_path)
        self._config = config
        self._commands = Commands()
        self.failure: BaseException | None = None
        """The error that stopped the engine. The process should end."""
        self._open: dict[str, OpenRequest] = {}
        self._next_id = 0
        self.policy_version = BASE_VERSION
        """Version with which the next request is sampled."""
        self._native: NativeAdapters | None = None
        self._merged = MergedColumns(model.lora_targets)
        self._priorities: dict[str, int] = {}
        """Number of the first request of each trajectory."""
        self._closing = False
        self._busy_s = 0.0
        self._num_preemptions = 0
        self._computed_tokens = 0
        start = partial(self._start, model_path, model, seed, in_lockstep, base)
        self._thread = threading.Thread(target=self._run, args=(start,), name="vllm-engine", daemon=True)
        self._thread.start()
        self._commands.submit(lambda: None).result()

    # --- called from any thread -----------------------------------------------------------------

    @property
    def load(self) -> EngineLoad:
        """The load of the engine. Its numbers are read without a lock and may be of different moments."""
        scheduler = self._scheduler
        return EngineLoad(
            busy_s=self._busy_s,
            kv_usage=float(scheduler.kv_cache_manager.usage),
            num_waiting=len(scheduler.waiting),
            num_preemptions=self._num_preemptions,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        return (await self.generate_together([request]))[0]

    async def generate_together(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Sample completions whose requests enter the engine together, in this order."""
        if self._config.adapter_mode == "merged" and not all(request.use_adapter for request in requests):
            raise EngineError("a merged engine holds no frozen base weights to sample with")
        futures: list[Future[Completion]] = [Future() for _ in requests]

        def add() -> None:
            for request, future in zip(requests, futures, strict=True):
                self._add(request, future)

        self._commands.submit(add)
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in futures)))

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache. The tokens of open requests are computed again."""
        await asyncio.wrap_future(self._commands.submit(self._forget_prefixes))

    async def pulse(self) -> Pulse:
        """Return the progress, as the computing thread reports it between two steps. Raises EngineError.

        A request would do as well, but change the shapes, and with them the last bits, of a synchronous run's batches.
        """
        read = self._commands.submit(lambda: Pulse(done=self._computed_tokens, num_open=len(self._open)))
        return await asyncio.wrap_future(read)

    async def read_back(self) -> ReadBack:
        """Compare the newest weights in the engine's memory with the ones that it received."""
        return await asyncio.wrap_future(self._commands.submit(self._read_back))

    def release(self, trajectory_id: str) -> None:
        with suppress(EngineError):
            self._commands.submit(lambda: self._abort(trajectory_id))

    async def load_adapter(self, version: int, adapter: bytes) -> str:
        """Sample with `adapter`, a newer version, from the next step on, and return the digest of its bytes.

        Raises ValueError, without any change, if it does not fit this model.
        """
        return await self.load_prepared(await self.prepare_adapter(version, adapter))

    async def prepare_adapter(self, version: int, adapter: bytes) -> Callable[[], str]:
        """Hash, check and write an adapter while the engine continues to sample, and return the rest of the work.

        Raises ValueError if it does not fit this model, OSError if there is no room for its files.
        """

        def prepare() -> Callable[[], str]:
            digest, native = hashlib.sha256(adapter).hexdigest(), self._native
            weights = native.write(version, digest, adapter) if native else self._merger.merged_weights(adapter)
            return partial(self._load, version, digest, weights)

        return await asyncio.to_thread(prepare)

    async def load_prepared(self, prepared: Callable[[], str]) -> str:
        """Do the rest of `load_adapter`, between two steps."""
        return await asyncio.wrap_future(self._commands.submit(prepared))

    def close(self) -> None:
        with suppress(EngineError):
            self._commands.submit(self._stop)
            self._thread.join(timeout=60)

    # --- the engine's thread --------------------------------------------------------------------

    def _start(
        self, model_path: Path, model: ModelConfig, seed: int, in_lockstep: bool, base: "ExportedBase | None"
    ) -> None:
        from transformers import AutoTokenizer

        scale = model.lora_alpha / model.lora_rank
        self._merger = AdapterMerger(model_path, scale, dtype=self._config.precision)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        # Of the tokenizer's own end vLLM knows, and it can be told to ignore that one.
        self._ends = [end for end in reply_ends(model_path, tokenizer) if end != tokenizer.eos_token_id]
        weights = base.joined() if base else None
        self._llm = build_llm(model_path, self._config, model, seed, in_lockstep=in_lockstep, base_weights=weights)
        self._scheduler = self._llm.engine_core.engine_core.scheduler
        if self._config.adapter_mode == "native":
            self._native = NativeAdapters(self._llm, self._merger)
        self._count_work()

    def _run(self, start: Callable[[], None]) -> None:
        try:
            start()
            while not self._closing:
                self._commands.run_all(idle=lambda: not self._open and not self._closing)
                self._step()
            self._commands.end(EngineError("the engine is closed"))
            free_memory(self._llm)
            self._native = None
            del self._llm
            gc.collect()
        except BaseException as error:
            logging.getLogger(__name__).exception("the engine stopped")
            # Set first, so that the process ends as soon as a caller sees the error.
            self.failure = error
            stopped = EngineError(f"the engine stopped: {error!r}")
            stopped.__cause__ = error
            for entry in self._open.values():
                entry.future.set_exception(stopped)
            self._open.clear()
            self._commands.end(stopped)

    def _step(self) -> None:
        started = time.perf_counter()
        for output in self._llm.step():
            if output.finished:
                entry = self._open.pop(output.request_id)
                # A request that vLLM aborted does not show what the policy would have sampled.
                if (reason := output.outputs[0].finish_reason) in ("stop", "length"):
                    entry.future.set_result(completion_of(output, entry))
                else:
                    entry.future.set_exception(EngineError(f"vLLM did not finish a request (finish_reason {reason!r})"))
        self._busy_s += time.perf_counter() - started

    def _add(self, request: GenerationRequest, future: Future[Completion]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._next_id += 1
        version = self.policy_version if request.use_adapter else BASE_VERSION
        # The oldest dialogue goes first: other dialogues' turns would evict its prefix from the cache.
        priority = self._priorities.setdefault(request.trajectory_id, self._next_id)
        adapter = self._native.request(version) if self._native else None
        try:
            self._llm.add_request(
                str(self._next_id),
                {"prompt_token_ids": list(request.prompt_token_ids)},
                sampling_params(request, self._ends),
                # Breaks ties between equal priorities. A count is the same in every run, unlike the time.
                arrival_time=float(self._next_id),
                lora_request=adapter,
                priority=priority,
            )
        except Exception as error:
            # The errors of vLLM have no common type. A refused request is its caller's fault.
            future.set_exception(ValueError(f"vLLM refused the request: {error}"))
            return
        self._open[str(self._next_id)] = OpenRequest(
            trajectory_id=request.trajectory_id, future=future, policy_version=version
        )

    def _abort(self, trajectory_id: str) -> None:
        self._priorities.pop(trajectory_id, None)
        ids = [key for key, entry in self._open.items() if entry.trajectory_id == trajectory_id]
        if ids:
            self._llm.abort_request(ids)
        for key in ids:
            self._open.pop(key).future.set_exception(EngineError("the trajectory was released"))

    def _load(self, version: int, digest: str, weights: "Iterator[tuple[str, Tensor]] | LoRARequest") -> str:
        """Load weights with the adapter folded in, or the request that names the adapter's files."""
        if self._native is None:
            self._reload(weights, version)
        else:
            self._native.load(version, weights)
            self._native.drop_unused({version, *(entry.policy_version for entry in self._open.values())})
        self.policy_version = version
        return digest

    def _read_back(self) -> ReadBack:
        if self._native is not None:
            return self._native.read_back(self.policy_version)
        (read,) = self._llm.apply_model(self._merged.read)
        return read

    def _reload(self, weights: "Iterator[tuple[str, Tensor]]", version: int) -> None:
        """Replace the weights in place, between two steps.

        Open requests continue with the new ones. Their keys and values, like the whole prefix cache, are of the old
        weights and are computed again.
        """
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._merged.kept(weights)})
        except Exception as error:
            raise EngineError("the weights were replaced in part") from error
        self._forget_prefixes()
        for request_id, entry in self._open.items():
            (internal_id,) = self._llm.output_processor.external_req_ids[request_id]
            num_sampled = self._scheduler.requests[internal_id].num_output_tokens
            if num_sampled:
                entry.switches.append((num_sampled, version))
            else:
                entry.policy_version = version

    def _forget_prefixes(self) -> None:
        before = self._num_preemptions
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("the prefix cache could not be emptied")
        self._num_preemptions = before

    def _count_work(self) -> None:
        """Count preemptions and computed tokens, which vLLM counts for its own log only."""
        preempt, update = self._scheduler._preempt_request, self._scheduler.update_from_output

        def counted_preempt(*arguments: Any, **options: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*arguments, **options)

        def counted_update(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._computed_tokens += scheduled.total_num_scheduled_tokens
            return update(scheduled, *arguments, **options)

        self._scheduler._preempt_request = counted_preempt
        self._scheduler.update_from_output = counted_update

    def _stop(self) -> None:
        while self._open:
            self._step()
        if self._native is not None:
            self._native.close()
        self._closing = True
