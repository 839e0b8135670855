"""What is vLLM's of the engine: how it is built, what it is asked, what comes back. The one file that imports vLLM."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from configs.base import lacks_avx512
from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.engine import GenerationRequest
from rollout.types import Completion, VersionSwitch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from vllm.config import ModelConfig as VllmModelConfig
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# It is for top-k and top-p, which nobody asks for here.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

MAX_LORAS = 4
"""Adapters that an engine of mode `native` holds at a time."""
CUDA_BATCHED_TOKENS = 2048
"""Tokens of one step on a GPU; a longer prompt takes several."""
LEAST_UTILIZATION = 0.01
FUSED = "agentflow_fused"
"""vLLM's name for our way to compute norms on a CPU."""
NORM_LANES = 16
"""Of so many values the kernels take whole vectors."""
SHARED_BASE = "agentflow_shared_base"
"""vLLM's name for our way to load a model."""


Result = TypeVar("Result")


@dataclass(slots=True)
class OpenRequest(Generic[Result]):
    """A request inside vLLM, and where its result goes."""

    trajectory_id: str
    future: Future[Result]
    policy_version: int
    result: "Callable[[RequestOutput, OpenRequest[Result]], Result]"
    switches: list[VersionSwitch] = field(default_factory=list)


def kv_block(device: Literal["cpu", "cuda"]) -> int:
    """Tokens of a block of the cache. On a GPU it is vLLM's own choice. On a CPU it also chooses the kernel of the
    attention: without AVX-512 that of 16 tokens samples 1.2 times as fast, with it both are alike; the tiles of AMX
    need 32."""
    return 16 if device == "cuda" or lacks_avx512() else 32


def engine_options(config: EngineConfig, model: ModelConfig, *, in_lockstep: bool = False) -> dict[str, object]:
    """What vLLM is told beyond what every engine has."""
    # A step is scheduled while the card computes the one before. Not where weights are replaced in place, which must
    # find no step under way, nor in lockstep, where every step is to have the same requests in every run.
    ahead = (config.device, config.adapter_mode) == ("cuda", "native") and not in_lockstep
    options: dict[str, object] = {"async_scheduling": ahead}
    if config.adapter_mode == "native":
        options |= {"enable_lora": True, "max_lora_rank": model.lora_rank, "max_cpu_loras": MAX_LORAS}
        options["max_loras"] = MAX_LORAS
        # Without the names vLLM readies the output head as well, which on a CPU is slow and breaks scoring: it counts
        # on one row per request there.
        options["lora_target_modules"] = list(model.lora_targets)
    if config.tensor_parallel > 1:
        # Inside a placement group vLLM would have Ray start its workers, and ask for room that nobody reserved.
        options |= {"tensor_parallel_size": config.tensor_parallel, "distributed_executor_backend": "mp"}
    if config.device == "cuda":
        options["kv_cache_memory_bytes"] = kv_cache_bytes(config)
        # The cache's size is given, so this share decides nothing; but vLLM refuses to start on a card that has less
        # than it free, and on a shared card the learner may have been first.
        options["gpu_memory_utilization"] = LEAST_UTILIZATION
    options["max_num_batched_tokens"] = batched_tokens(config)
    return options


def kv_cache_bytes(config: EngineConfig) -> int:
    """What is reserved for the cache; on a CPU vLLM takes whole GiB."""
    return int(config.kv_cache_gib * 2**30) if config.device == "cuda" else _cpu_cache_gib(config) * 2**30


def batched_tokens(config: EngineConfig) -> int:
    """The most of one step. On a CPU the least that takes the longest prompt whole: what comes first, as the proof of
    new weights, waits for no other prompts in its step."""
    return max(CUDA_BATCHED_TOKENS if config.device == "cuda" else config.max_model_len, config.max_num_seqs)


def _cpu_cache_gib(config: EngineConfig) -> int:
    return max(1, round(config.kv_cache_gib))


def build_llm(
    model_path: Path,
    config: EngineConfig,
    model: ModelConfig,
    seed: int,
    *,
    in_lockstep: bool = False,
    base_weights: "Mapping[str, Tensor] | None" = None,
) -> "LLMEngine":
    """`base_weights`: tensors by vLLM's names, on the device and in the engine's type, which are read where they lie;
    None loads them from the model's files. Raises ValueError where they are not this model's."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_cpu_cache_gib(config))
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model_path),
            dtype=config.precision,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=seed,
            scheduling_policy="priority",
            # On a CPU a prompt is computed in one step or not yet: the sampler of a request with a seed cannot take
            # back what it draws after a part of a prompt.
            enable_chunked_prefill=config.device == "cuda",
            enforce_eager=config.device == "cpu",
            enable_prefix_caching=True,
            block_size=_cpu_kv_block() if config.device == "cpu" else None,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
            disable_log_stats=not config.metrics,
            **({"ir_op_priority": fused_norms()} if config.device == "cpu" else {}),
            **({} if base_weights is None else {"load_format": _register_loader(base_weights)}),
            **engine_options(config, model, in_lockstep=in_lockstep),
        ),
        stat_loggers=[_ray_metrics()] if config.metrics else None,
    )
    # Compiled in the background, a cached grammar is ready a step earlier or later by chance, and two runs
    # with one seed would batch differently.
    llm.engine_core.engine_core.structured_output_manager._use_async_grammar_compilation = False
    return llm


def free_memory(llm: "LLMEngine") -> None:
    """Let go of weights and cache. Dropping the engine alone keeps them: a finalizer of its client holds its core. The
    core's own way to end would end `torch.distributed` for all that use it in this process."""
    client = llm.engine_core
    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()


def _cpu_kv_block() -> int:
    """The block of a CPU's cache, which vLLM is told it may have: it counts on multiples of 32 only, though it has a
    kernel of 16."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    block = kv_block("cpu")
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(block)])
    return block


def fused_norms() -> dict[str, list[str]]:
    """Have vLLM compute norms on a CPU with the kernels that it has for them, and says only cards may use: eight small
    operations become one, of which a model has two for each layer. Returns whose come first."""
    import torch
    import vllm.kernels  # noqa: F401  # loads torch.ops._C
    from vllm import ir

    def fits(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
        whole = variance_size is None and weight is not None and weight.dtype == x.dtype
        return whole and x.is_contiguous() and x.shape[-1] % NORM_LANES == 0

    def norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        normed = torch.empty_like(x)
        torch.ops._C.rms_norm(normed, x, weight, epsilon)
        return normed

    def norm_of_sum(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    rms_norm, fused_add_rms_norm = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    if FUSED not in rms_norm.impls:
        rms_norm.register_impl(
            FUSED, supports_args=lambda x, weight, epsilon, variance_size=None: fits(x, weight, variance_size)
        )(norm)
        fused_add_rms_norm.register_impl(
            FUSED,
            supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
                fits(x, weight, variance_size) and x_residual.is_contiguous()
            ),
            inplace=True,
        )(norm_of_sum)
    return {op.name: [FUSED, "native"] for op in (rms_norm, fused_add_rms_norm)}


def _register_loader(base_weights: "Mapping[str, Tensor]") -> str:
    """Have vLLM build its next model on these tensors; returns the name of the way to load it."""
    import torch
    from torch.overrides import TorchFunctionMode
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class EmptyOnMeta(TorchFunctionMode):
        """What is allocated to be loaded takes no memory. Tables that a model computes are made as ever."""

        def __torch_function__(
            self,
            function: "Callable[..., Tensor]",
            types: object,
            args: Sequence[object] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> "Tensor":
            where = {"device": "meta"} if function is torch.empty else {}
            return function(*args, **{**(kwargs or {}), **where})

    class SharedBaseLoader(BaseModelLoader):
        def download_model(self, model_config: "VllmModelConfig") -> None:
            pass

        # What it holds elsewhere is not told: vLLM would count it in LEAST_UTILIZATION and refuse to start.
        def create_model(self, *arguments: object, **options: object) -> "Module":
            with EmptyOnMeta():
                return super().create_model(*arguments, **options)

        def load_weights(self, model: "Module", model_config: "VllmModelConfig") -> None:
            put_base(model, base_weights)

    register_model_loader(SHARED_BASE)(SharedBaseLoader)
    return SHARED_BASE


def put_base(model: "Module", base_weights: "Mapping[str, Tensor]") -> None:
    """Let the model read these tensors in the place of its own parameters, tied ones as well. Raises ValueError where
    one is missing or has another shape."""
    import torch

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            name = names[id(parameter)]
            shared = base_weights.get(name)
            if shared is None or shared.shape != parameter.shape:
                raise ValueError(
                    f"the engine wants {name} {list(parameter.shape)}, and the shared base weights have "
                    f"{'none' if shared is None else list(shared.shape)}; set card.share_base=false"
                )
            module.register_parameter(leaf, torch.nn.Parameter(shared, requires_grad=False))


def _ray_metrics() -> "type[RayPrometheusStatLogger]":
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return RayPrometheusStatLogger


def sampling_params(request: GenerationRequest) -> "SamplingParams":
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    grammar = StructuredOutputsParams(grammar=request.grammar) if request.grammar else None
    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        logprobs=0,
        seed=request.seed,
        stop=list(request.stop) or None,
        structured_outputs=grammar,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> "SamplingParams":
    """For the log-probs of a prompt."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)


def lora_request(name: str, number: int, folder: Path) -> "LoRARequest":
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder))


def completion_of(finished: "RequestOutput", entry: OpenRequest[Completion]) -> Completion:
    output = finished.outputs[0]
    token_ids = tuple(output.token_ids)
    logprobs = tuple(step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True))
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=output.text,
        finish_reason=output.finish_reason,
        policy_version=entry.policy_version,
        switches=tuple(entry.switches),
    )


def prompt_logprobs_of(finished: "RequestOutput", entry: OpenRequest[list[float]]) -> list[float]:
    pairs = zip(finished.prompt_token_ids[1:], finished.prompt_logprobs[1:], strict=True)
    return [float(step[token].logprob) for token, step in pairs]
