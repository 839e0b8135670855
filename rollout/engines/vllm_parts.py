"""The parts of the engine that import vLLM."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from configs.base import lacks_avx512
from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.engine import GenerationRequest
from rollout.types import Completion

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from vllm.config import ModelConfig as VllmModelConfig
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# FlashInfer's sampler is for top-k and top-p, which no request uses.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

MAX_LORAS = 4
"""Adapters that an engine of mode `native` holds at a time."""
CUDA_BATCHED_TOKENS = 2048
"""Tokens of one step on a GPU. A longer prompt takes several steps."""
LEAST_UTILIZATION = 0.01
LOAD_FORMAT = "safetensors"
FUSED = "agentflow_fused"
"""vLLM's name of our kernels for norms on a CPU."""
NORM_LANES = 16
"""Vector length of these kernels. A row must be a multiple."""
SHARED_BASE = "agentflow_shared_base"
"""vLLM's name of our loader of shared weights."""


@dataclass(slots=True)
class OpenRequest:
    """A request inside vLLM; `policy_version` sampled its first token."""

    trajectory_id: str
    future: Future[Completion]
    policy_version: int
    switches: list[tuple[int, int]] = field(default_factory=list)


def kv_block(device: Literal["cpu", "cuda"]) -> int:
    """Return the tokens of a block of the KV cache: on a GPU vLLM's default.

    On a CPU it also selects the attention kernel. Without AVX-512 the kernel for 16 tokens samples 1.2 times as fast,
    with it both are equal, and the tiles of AMX need 32.
    """
    return 16 if device == "cuda" or lacks_avx512() else 32


def engine_options(config: EngineConfig, model: ModelConfig, *, in_lockstep: bool = False) -> dict[str, object]:
    """Return the arguments of vLLM that depend on device, adapter mode and lockstep."""
    # A step is scheduled while the card computes the one before. Weights that are replaced in place must find no step
    # in progress, and in lockstep every step must have the same requests in every run.
    ahead = (config.device, config.adapter_mode) == ("cuda", "native") and not in_lockstep
    options: dict[str, object] = {"async_scheduling": ahead}
    if config.adapter_mode == "native":
        options |= {"enable_lora": True, "max_lora_rank": model.lora_rank, "max_cpu_loras": MAX_LORAS}
        options["max_loras"] = MAX_LORAS
        # Without these names vLLM also prepares the output head for adapters, which is slow on a CPU.
        options["lora_target_modules"] = list(model.lora_targets)
    if config.tensor_parallel > 1:
        # Inside a placement group vLLM would start its workers through Ray, with resources that are not reserved.
        options |= {"tensor_parallel_size": config.tensor_parallel, "distributed_executor_backend": "mp"}
    if config.device == "cuda":
        options["kv_cache_memory_bytes"] = kv_cache_bytes(config)
        # The size of the cache is explicit. vLLM refuses to start on a card with less free memory than this share, and
        # on a shared card the learner may have started first.
        options["gpu_memory_utilization"] = LEAST_UTILIZATION
    options["max_num_batched_tokens"] = batched_tokens(config)
    return options


def kv_cache_bytes(config: EngineConfig) -> int:
    """Return the memory that vLLM reserves for the KV cache. On a CPU it takes whole GiB."""
    gib = config.kv_cache_gib if config.device == "cuda" else max(1, round(config.kv_cache_gib))
    return int(gib * 2**30)


def batched_tokens(config: EngineConfig) -> int:
    """Return the most tokens of one step. On a CPU it is the least that takes the longest prompt in one step."""
    return max(CUDA_BATCHED_TOKENS if config.device == "cuda" else config.max_model_len, config.max_num_seqs)


def build_llm(
    model_path: Path,
    config: EngineConfig,
    model: ModelConfig,
    seed: int,
    *,
    in_lockstep: bool = False,
    base_weights: "Mapping[str, Tensor] | None" = None,
) -> "LLMEngine":
    """Build vLLM's engine in this process.

    `base_weights` by vLLM's names, on the device and in the engine's type, are used in place of the model's files.
    Raises ValueError if they do not fit the model.
    """
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_bytes(config) // 2**30)
    if config.device == "cpu":
        _rank_without_compiler()
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    stat_loggers = None
    if config.metrics:
        from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

        stat_loggers = [RayPrometheusStatLogger]
    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model_path),
            dtype=config.precision,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=seed,
            scheduling_policy="priority",
            # On a CPU a prompt is computed in one step: the sampler of a request with a seed would draw after each
            # part of a prompt and cannot take the draw back.
            enable_chunked_prefill=config.device == "cuda",
            enforce_eager=config.device == "cpu",
            enable_prefix_caching=True,
            block_size=_set_cpu_kv_block() if config.device == "cpu" else None,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
            disable_log_stats=not config.metrics,
            **({"ir_op_priority": fused_norms()} if config.device == "cpu" else {}),
            # Otherwise vLLM prefers Mistral's own files where a folder has both, unlike the learner and the export.
            config_format="hf",
            tokenizer_mode="hf",
            load_format=LOAD_FORMAT if base_weights is None else _register_loader(base_weights),
            **engine_options(config, model, in_lockstep=in_lockstep),
        ),
        stat_loggers=stat_loggers,
    )
    # A grammar that is compiled in the background is ready a step earlier or later by chance, and two runs with the
    # same seed would batch differently.
    llm.engine_core.engine_core.structured_output_manager._use_async_grammar_compilation = False
    return llm


def free_memory(llm: "LLMEngine") -> None:
    """Free the weights and the KV cache.

    A finalizer of the deleted engine's client holds its core, whose own shutdown would end `torch.distributed` for the
    whole process.
    """
    client = llm.engine_core
    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()


def _set_cpu_kv_block() -> int:
    # vLLM has a CPU kernel for blocks of 16 tokens, but expects multiples of 32.
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    block = kv_block("cpu")
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(block)])
    return block


def _rank_without_compiler() -> None:
    """Replace the function that vLLM compiles at the first token, which takes seconds and needs a C++ compiler."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda logprobs, sampled: (logprobs >= sampled).sum(-1)


def fused_norms() -> dict[str, list[str]]:
    """Register vLLM's kernels for norms on a CPU, which it uses on cards only, and return the priority of each.

    A kernel replaces eight small operations.
    """
    import torch
    import vllm.kernels  # noqa: F401  # loads torch.ops._C
    from torch import Tensor
    from vllm import ir

    Weight = Tensor | None
    Size = int | None

    def fits(x: Tensor, weight: Weight, epsilon: float, variance_size: Size = None) -> bool:
        whole = variance_size is None and weight is not None and weight.dtype == x.dtype
        return whole and x.is_contiguous() and x.shape[-1] % NORM_LANES == 0

    def norm(x: Tensor, weight: Weight, epsilon: float, variance_size: Size = None) -> Tensor:
        normed = torch.empty_like(x)
        torch.ops._C.rms_norm(normed, x, weight, epsilon)
        return normed

    def fits_sum(x: Tensor, x_residual: Tensor, weight: Weight, epsilon: float, variance_size: Size = None) -> bool:
        return fits(x, weight, epsilon, variance_size) and x_residual.is_contiguous()

    def norm_of_sum(
        x: Tensor, x_residual: Tensor, weight: Weight, epsilon: float, variance_size: Size = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    rms_norm, fused_add_rms_norm = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    if FUSED not in rms_norm.impls:
        rms_norm.register_impl(FUSED, supports_args=fits)(norm)
        fused_add_rms_norm.register_impl(FUSED, supports_args=fits_sum, inplace=True)(norm_of_sum)
    return {op.name: [FUSED, "native"] for op in (rms_norm, fused_add_rms_norm)}


def _register_loader(base_weights: "Mapping[str, Tensor]") -> str:
    """Register a loader that builds vLLM's next model on these tensors, and return its name."""
    import torch
    from torch.overrides import TorchFunctionMode
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class EmptyOnMeta(TorchFunctionMode):
        """`torch.empty` takes no memory. Tables that a model computes are made as usual."""

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

        # The size of the shared weights is not reported: vLLM would compare it with LEAST_UTILIZATION and refuse.
        def create_model(self, *arguments: object, **options: object) -> "Module":
            with EmptyOnMeta():
                return super().create_model(*arguments, **options)

        def load_weights(self, model: "Module", model_config: "VllmModelConfig") -> None:
            put_base(model, base_weights)

    register_model_loader(SHARED_BASE)(SharedBaseLoader)
    return SHARED_BASE


def put_base(model: "Module", base_weights: "Mapping[str, Tensor]") -> None:
    """Replace all parameters of a model, tied ones included, by these tensors. Raises ValueError if they do not fit."""
    import torch

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            name = names[id(parameter)]
            shared = base_weights.get(name)
            if shared is None or shared.shape != parameter.shape:
                raise ValueError(
                    f"the engine needs {name} of shape {list(parameter.shape)}, and the shared base weights have "
                    f"{'none' if shared is None else list(shared.shape)}; set card.share_base=false"
                )
            module.register_parameter(leaf, torch.nn.Parameter(shared, requires_grad=False))


def sampling_params(request: GenerationRequest, ends: Sequence[int] = ()) -> "SamplingParams":
    """Return vLLM's form of a request. `ends` end a reply besides the tokens that vLLM knows."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        logprobs=0,
        seed=request.seed,
        stop=list(request.stop) or None,
        stop_token_ids=list(ends),
        structured_outputs=StructuredOutputsParams(grammar=request.grammar) if request.grammar else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(finished: "RequestOutput", entry: OpenRequest) -> Completion:
    output = finished.outputs[0]
    token_ids = tuple(output.token_ids)
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True)),
        text=output.text,
        finish_reason=output.finish_reason,
        policy_version=entry.policy_version,
        switches=tuple(entry.switches),
    )
