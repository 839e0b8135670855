"""What quantisation changed: the same planner prompts through the merged model and through its GGUF file."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from xgrammar.contrib.hf import LogitsProcessor

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationGap:
    """Over the tokens that the merged model writes greedily, under the grammar, after each prompt; log-probs in nats,
    of the whole vocabulary at temperature 1.

    mean_abs_logprob, max_abs_logprob: of the written tokens. mean_kl: from the merged model's distribution to the
    file's, per token. same_top: share of the tokens at which both rank the same one first. same_answers: prompts after
    which the file writes exactly the same answer.
    """

    num_prompts: int
    num_tokens: int
    mean_abs_logprob: float
    max_abs_logprob: float
    mean_kl: float
    same_top: float
    same_answers: int


def measure_gap(
    merged: Path, gguf: Path, prompts: Sequence[Prompt], *, grammar: str, max_new_tokens: int
) -> QuantizationGap:
    """One model is in memory at a time, in float32."""
    form = _Form(merged, grammar)
    with loaded_model(merged) as model:
        answers = [greedy_answer(model, prompt, max_new_tokens, form) for prompt in prompts]
        expected = [_logprobs(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    with loaded_model(gguf) as model:
        own_answers = [greedy_answer(model, prompt, max_new_tokens, form) for prompt in prompts]
        found = [_logprobs(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    reference, quantized = torch.cat(expected), torch.cat(found)
    written = torch.tensor([token for answer in answers for token in answer])[:, None]
    gaps = (reference.gather(1, written) - quantized.gather(1, written)).abs()
    kl = (reference.exp() * (reference - quantized)).sum(dim=1)
    return QuantizationGap(
        num_prompts=len(prompts),
        num_tokens=len(written),
        mean_abs_logprob=float(gaps.mean()),
        max_abs_logprob=float(gaps.max()),
        mean_kl=float(kl.mean()),
        same_top=float((quantized.argmax(dim=1) == reference.argmax(dim=1)).float().mean()),
        same_answers=sum(one == other for one, other in zip(answers, own_answers, strict=True)),
    )


@contextmanager
def loaded_model(path: Path) -> "Iterator[PreTrainedModel]":
    """A model folder or a GGUF file, weights in float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    source: dict[str, object] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        source = {
            "pretrained_model_name_or_path": path.parent,
            "gguf_file": path.name,
            "quantization_config": GgufConfig(dequantize=True),
        }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    yield model.eval()


class _Form:
    """A grammar for one model's tokens, to be replayed from the start for every answer."""

    def __init__(self, model_path: Path, grammar: str) -> None:
        import xgrammar
        from transformers import AutoConfig, AutoTokenizer

        vocab_size = int(AutoConfig.from_pretrained(model_path).vocab_size)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiled = xgrammar.GrammarCompiler(info).compile_grammar(grammar)

    def processor(self) -> "LogitsProcessor":
        from xgrammar.contrib.hf import LogitsProcessor

        return LogitsProcessor(self._compiled)


@torch.inference_mode()
def greedy_answer(model: "PreTrainedModel", prompt: Prompt, max_new_tokens: int, form: _Form | None = None) -> Prompt:
    """The token ids that the model writes after the prompt, its end included; under a grammar where one is given."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        logits_processor=[form.processor()] if form else None,
        # One answer is never padded; the model's own end may be several tokens, and a pad is one.
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


@torch.inference_mode()
def _logprobs(model: "PreTrainedModel", prompt: Prompt, answer: Prompt) -> Tensor:
    """`[len(answer), V]`: the distribution from which each token of the answer was taken."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)
