"""The vLLM engine: one thread owns it, others hand it work; versions change between steps."""

import asyncio
import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.adapters import AdapterMerger, NativeAdapters
from rollout.engines.engine import BASE_VERSION, Commands, EngineError, EngineLoad, GenerationRequest, Pulse
from rollout.engines.read_back import MergedColumns, ReadBack
from rollout.engines.vllm_parts import (
    OpenRequest,
    build_llm,
    completion_of,
    free_memory,
    kv_block,
    prompt_logprobs_of,
    sampling_params,
    scoring_params,
)
from rollout.types import Completion, VersionSwitch

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.engines.base_weights import ExportedBase
    from rollout.engines.vllm_parts import LoRARequest, RequestOutput, Result, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAdapter:
    """An adapter that was hashed and checked. `weights`: the whole model with the adapter folded in, computed as they
    are read, or where its files lie for vLLM."""

    version: int
    digest: str
    weights: "Iterator[tuple[str, Tensor]] | LoRARequest"


FIRST = 0
"""Priority of the canary, before all trajectories, which begin at 1: it is short and holds up everything that is
sampled with new weights."""


@dataclass(slots=True)
class _Dialogue:
    """A trajectory's requests: the number of the first one, and what the newest that ended was told and answered."""

    number: int
    told: tuple[int, ...] = ()

    def repeated(self, output: "RequestOutput", block: int) -> int:
        """Tokens of this request that were computed for the one before. The cache is cut into blocks: what is less than
        one is always computed again."""
        prompt, before = output.prompt_token_ids, self.told
        self.told = (*prompt, *output.outputs[0].token_ids)
        if not before or tuple(prompt[: len(before)]) != before:
            return 0
        # The last token of a completion was sampled, and its own step never ran.
        return max(0, (len(before) - 1) // block * block - (output.num_cached_tokens or 0))


class VllmEngine:
    """A `PolicyEngine` over vLLM, for a base model and the adapters trained on it.

    Adapter mode `merged` folds each version into the base weights (exactly W0 + scale * B A, computed from
    the untouched W0 every time); `native` gives each version a LoRA adapter of its own name. `in_lockstep`: every step
    is to have the same requests in every run. `base`: weights that another process holds, read where they lie; `native`
    only, since merging would write to them.
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
        self._model_path = model_path
        self._base = base
        self._config = config
        self._model = model
        self._seed = seed
        self._in_lockstep = in_lockstep
        self._commands = Commands()
        self.failure: BaseException | None = None
        """What stopped the engine; None while it works, and after `close`."""
        self._open: dict[str, OpenRequest] = {}
        self._next_id = 0
        self.policy_version = BASE_VERSION
        """The one that the next request will sample with."""
        self._native: NativeAdapters | None = None
        self._merged = MergedColumns(model.lora_targets)
        self._dialogues: dict[str, _Dialogue] = {}
        self._closing = False
        self._busy_s = 0.0
        self._num_preemptions = 0
        self._computed_tokens = 0
        self._repeated_tokens = 0
        self.sampled_tokens = 0
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()
        self._commands.submit(lambda: None).result()

    # --- called from any thread -----------------------------------------------------------------

    @property
    def load(self) -> EngineLoad:
        """How hard the engine works. Read from another thread: the numbers need not be of the same instant."""
        scheduler = self._scheduler
        return EngineLoad(
            busy_s=self._busy_s,
            kv_usage=float(scheduler.kv_cache_manager.usage),
            num_waiting=len(scheduler.waiting),
            num_preemptions=self._num_preemptions,
            computed_tokens=self._computed_tokens,
            repeated_tokens=self._repeated_tokens,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        return (await self.generate_together([request]))[0]

    async def generate_together(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Sample several completions that enter the engine in this order, between the same two steps."""
        if self._config.adapter_mode == "merged" and not all(request.use_adapter for request in requests):
            raise EngineError("a merged engine holds no frozen base weights to sample with")
        futures: list[Future[Completion]] = [Future() for _ in requests]

        def add() -> None:
            for request, future in zip(requests, futures, strict=True):
                self._add(request, future)

        self._commands.submit(add)
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in futures)))

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache. Open requests are computed anew up to where they are."""
        await asyncio.wrap_future(self._commands.submit(self._forget_prefixes))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Goes before everything that waits."""
        future: Future[list[float]] = Future()
        self._commands.submit(lambda: self._add_scoring(tuple(token_ids), future))
        return await asyncio.wrap_future(future)

    async def pulse(self) -> Pulse:
        return await asyncio.wrap_future(
            self._commands.submit(lambda: Pulse(done=self._computed_tokens, num_open=len(self._open)))
        )

    async def read_back(self) -> ReadBack:
        return await asyncio.wrap_future(self._commands.submit(self._read_back))

    def release(self, trajectory_id: str) -> None:
        """Drop what a trajectory that ended early still has open; nobody waits for it any more."""
        with suppress(EngineError):
            self._commands.submit(lambda: self._abort(trajectory_id))

    async def load_adapter(self, version: int, adapter: bytes) -> str:
        """Sample with `adapter` from the next step on; returns the digest of what was loaded. Raises ValueError, and
        goes on as before, for a version that is not newer than the one before or bytes that are no adapter of this
        model."""
        return await self.load_prepared(await self.prepare_adapter(version, adapter))

    async def prepare_adapter(self, version: int, adapter: bytes) -> PreparedAdapter:
        """Hash, check and write an adapter while the engine samples on. Raises ValueError for bytes that are no adapter
        of this model, and where there is no room for them."""
        return await asyncio.to_thread(self._prepare, version, adapter)

    async def load_prepared(self, prepared: PreparedAdapter) -> str:
        """The rest of `load_adapter`, between two steps."""
        return await asyncio.wrap_future(self._commands.submit(lambda: self._load(prepared)))

    async def load_base(self) -> None:
        """Sample with the untouched model again."""
        await asyncio.wrap_future(self._commands.submit(self._unload))

    def close(self) -> None:
        """Finish what is open, end the thread and give the memory back."""
        with suppress(EngineError):
            self._commands.submit(self._stop)
            self._thread.join(timeout=60)

    def _prepare(self, version: int, adapter: bytes) -> PreparedAdapter:
        digest = hashlib.sha256(adapter).hexdigest()
        if self._native is None:
            return PreparedAdapter(version=version, digest=digest, weights=self._merger.merged_weights(adapter))
        written = self._native.write(version, digest, adapter)
        return PreparedAdapter(version=version, digest=digest, weights=written)

    # --- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            scale = self._model.lora_alpha / self._model.lora_rank
            self._merger = AdapterMerger(self._model_path, scale, dtype=self._config.precision)
            self._llm = build_llm(
                self._model_path,
                self._config,
                self._model,
                self._seed,
                in_lockstep=self._in_lockstep,
                base_weights=self._base.joined() if self._base else None,
            )
            self._scheduler = self._llm.engine_core.engine_core.scheduler
            if self._config.adapter_mode == "native":
                self._native = NativeAdapters(self._llm, self._merger)
            self._count_preemptions()
            self._count_computed_tokens()
            while not self._closing:
                self._commands.run_all(idle=lambda: not self._open and not self._closing)
                self._step()
            self._commands.end(EngineError("the engine is closed"))
            self._free_memory()
        except BaseException as error:
            logging.getLogger(__name__).exception("the engine stopped")
            self._fail(error)

    def _step(self) -> None:
        started = time.perf_counter()
        for output in self._llm.step():
            if output.finished:
                entry = self._open.pop(output.request_id)
                self.sampled_tokens += len(output.outputs[0].token_ids)
                if dialogue := self._dialogues.get(entry.trajectory_id):
                    self._repeated_tokens += dialogue.repeated(output, kv_block(self._config.device))
                # What vLLM gave up on its way is no decision of the policy.
                if (reason := output.outputs[0].finish_reason) in ("stop", "length"):
                    entry.future.set_result(entry.result(output, entry))
                else:
                    entry.future.set_exception(EngineError(f"vLLM did not finish a request (finish_reason {reason!r})"))
        self._busy_s += time.perf_counter() - started

    def _add(self, request: GenerationRequest, future: Future[Completion]) -> None:
        entry = OpenRequest(
            trajectory_id=request.trajectory_id,
            future=future,
            policy_version=self.policy_version if request.use_adapter else BASE_VERSION,
            result=completion_of,
        )
        # Who began first goes first: the next turn of a dialogue finds its beginning in the cache, where it would be
        # evicted while all the others have their turns.
        dialogue = self._dialogues.setdefault(request.trajectory_id, _Dialogue(self._next_id + 1))
        self._open_request(request.prompt_token_ids, lambda: sampling_params(request), entry, priority=dialogue.number)

    def _add_scoring(self, token_ids: tuple[int, ...], future: Future[list[float]]) -> None:
        entry = OpenRequest(
            trajectory_id="", future=future, policy_version=self.policy_version, result=prompt_logprobs_of
        )
        self._open_request(token_ids, scoring_params, entry, priority=FIRST)

    def _open_request(
        self,
        token_ids: Sequence[int],
        params: "Callable[[], SamplingParams]",
        entry: "OpenRequest[Result]",
        *,
        priority: int,
    ) -> None:
        if not entry.future.set_running_or_notify_cancel():
            return
        self._next_id += 1
        adapter = self._native.request(entry.policy_version) if self._native else None
        try:
            self._llm.add_request(
                str(self._next_id),
                {"prompt_token_ids": list(token_ids)},
                params(),
                # Equals go by their time. A count is the same in every run and never goes back.
                arrival_time=float(self._next_id),
                lora_request=adapter,
                priority=priority,
            )
        except Exception as error:
            # Whatever vLLM calls it, a refused request is its caller's fault, and the caller is waiting.
            entry.future.set_exception(ValueError(f"vLLM refused the request: {error}"))
            return
        self._open[str(self._next_id)] = entry

    def _abort(self, trajectory_id: str) -> None:
        self._dialogues.pop(trajectory_id, None)
        ids = [key for key, entry in self._open.items() if entry.trajectory_id == trajectory_id]
        if ids:
            self._llm.abort_request(ids)
        for key in ids:
            self._open.pop(key).future.set_exception(EngineError("the trajectory was released"))

    def _drain(self) -> None:
        while self._open:
            self._step()

    def _load(self, prepared: PreparedAdapter) -> str:
        version, weights = prepared.version, prepared.weights
        if version <= self.policy_version:
            if self._native is not None:
                self._native.discard(weights)
            raise ValueError(f"adapter version {version} is not newer than {self.policy_version}, which is loaded")
        if self._native is None:
            self._reload(weights, version)
        else:
            self._native.load(version, weights)
            self._native.drop_unused({version, *(entry.policy_version for entry in self._open.values())})
        self.policy_version = version
        return prepared.digest

    def _read_back(self) -> ReadBack:
        if self._native is not None:
            return self._native.read_back(self.policy_version)
        (found,) = self._llm.apply_model(self._merged.read)
        return found

    def _unload(self) -> None:
        self._drain()
        if self._native is None:
            self._reload(self._merger.base_weights(), BASE_VERSION)
        else:
            self._native.drop_unused(set())
        self.policy_version = BASE_VERSION

    def _reload(self, weights: "Iterator[tuple[str, Tensor]]", version: int) -> None:
        """New weights in place, between two steps. Open requests are computed anew up to where they are: what they
        and the cache hold was computed with the old weights."""
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._merged.kept(weights)})
        except Exception as error:
            raise EngineError("the weights were replaced in part") from error
        self._forget_prefixes()
        for request_id, entry in self._open.items():
            (own_id,) = self._llm.output_processor.external_req_ids[request_id]
            num_sampled = self._scheduler.requests[own_id].num_output_tokens
            if num_sampled:
                entry.switches.append(VersionSwitch(index=num_sampled, policy_version=version))
            else:
                entry.policy_version = version

    def _forget_prefixes(self) -> None:
        before = self._num_preemptions
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("the prefix cache could not be emptied")
        self._num_preemptions = before

    def _count_preemptions(self) -> None:
        """vLLM counts them for its own log only."""
        preempt = self._scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*arguments, **options)

        self._scheduler._preempt_request = counted

    def _count_computed_tokens(self) -> None:
        """Of prompts as well, and of requests that are open still: what only waits has none."""
        update = self._scheduler.update_from_output

        def counted(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._computed_tokens += scheduled.total_num_scheduled_tokens
            return update(scheduled, *arguments, **options)

        self._scheduler.update_from_output = counted

    def _stop(self) -> None:
        self._drain()
        if self._native is not None:
            self._native.close()
        self._closing = True

    def _free_memory(self) -> None:
        free_memory(self._llm)
        self._native = None
        del self._llm
        gc.collect()

    def _fail(self, error: BaseException) -> None:
        """Whoever learns of it finds `failure` set: its process is to end."""
        self.failure = error
        stopped = EngineError(f"the engine stopped: {error!r}")
        stopped.__cause__ = error
        for entry in self._open.values():
            entry.future.set_exception(stopped)
        self._open.clear()
        self._commands.end(stopped)
