"""TRL's GRPOTrainer on a job of `time_to_skill.py`: `python skill_peer.py JOB.json`, in TRL's environment.

Says a line of JSON before the first step and after every so many, once the adapter of that moment is saved, and waits
for `go on`; anything else ends it. Saving and waiting are off its clock. Of this project it imports rewards and the
clerk's tool alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trl_peer import settings

sys.path.append(str(Path(__file__).parents[1]))
import clerk
import expressions

CHAT_WITH_TOOLS = """
{%- for message in messages %}
    {%- if message.role != "tool" %}
        {{- "<|im_start|>" + message.role + "\n" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "\n" if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- else %}
        {{- "<|im_start|>user" if loop.previtem.role != "tool" }}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {{- "<|im_end|>\n" if loop.last or loop.nextitem.role != "tool" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
"""The model's own has no place for calls and their results. What can be called stands in the prompts already."""


def expressions_rewards(completions: list[str], numbers: list[list[int]], value: list[int], **_: Any) -> list[float]:
    return [expressions.solved(*one) for one in zip(completions, numbers, value, strict=True)]


def clerk_rewards(completions: list[list[Mapping[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    answers = map(clerk.said_last, completions)
    return [clerk.solved(*one) for one in zip(answers, answer, strict=True)]


@dataclass(frozen=True)
class Skill:
    rewards: Callable[..., list[float]]
    tools: list[Callable[..., str]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)


SKILLS = {
    "expressions": Skill(expressions_rewards),
    "clerk": Skill(clerk_rewards, [clerk.look], {"max_tool_calling_iterations": clerk.MAX_LOOKS}),
}


def main() -> None:
    import torch
    from transformers import AutoTokenizer

    # What libraries print is not for the one who listens.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model_path"])
    prompt_ids = [row.pop("token_ids") for row in job["rows"]]
    trainer = make_trainer(job, tokenizer, out)
    check_tokens(trainer, job, prompt_ids)
    trainer.train()


def check_tokens(trainer: Any, job: Mapping[str, Any], prompt_ids: list[list[int]]) -> None:
    """The trainer tokenises prompts and what calls bring itself: they must come out as the very tokens that the other
    side sends."""
    prompts = [row["prompt"] for row in job["rows"]]
    for prompt, own, theirs in zip(prompts, trainer._tokenize_prompts(prompts)[0], prompt_ids, strict=True):
        assert own == theirs, prompt
    for one in job["between"]:
        messages = [{"role": "tool", "name": clerk.look.__name__, "content": result} for result in one["results"]]
        assert trainer._get_tool_suffix_ids(messages) == one["token_ids"], one["results"]


def make_trainer(job: dict[str, Any], tokenizer: Any, out: IO[str]) -> Any:
    """It goes on from the adapter in the folder `job["adapter"]`."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self._trained_s = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            self._report(0, control, model)
            self._since = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            self._trained_s += time.perf_counter() - self._since
            if state.global_step % job["every"] == 0:
                self._report(state.global_step, control, model)
            self._since = time.perf_counter()

        def _report(self, step: int, control: Any, model: Any) -> None:
            folder = Path(job["output_dir"]) / f"step-{step}"
            model.save_pretrained(folder)
            facts = {"step": step, "seconds": self._trained_s, "adapter": str(folder / "adapter_model.safetensors")}
            print(json.dumps(facts), file=out)
            control.should_training_stop = sys.stdin.readline().strip() != "go on"

    skill = SKILLS[job["kind"]]
    if skill.tools:
        tokenizer.chat_template, tokenizer.response_template = CHAT_WITH_TOOLS, qwen3_template
    base = AutoModelForCausalLM.from_pretrained(job["model_path"], dtype=job["dtype"])
    return GRPOTrainer(
        model=PeftModel.from_pretrained(base, job["adapter"], is_trainable=True),
        reward_funcs=skill.rewards,
        tools=skill.tools or None,
        args=settings(job, **skill.settings),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )


if __name__ == "__main__":
    main()
