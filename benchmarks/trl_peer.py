"""TRL's GRPOTrainer on the job of `time_to_skill.py`: `python trl_peer.py JOB.json`, in TRL's environment.

Prints one line of JSON before the first step and after every few steps, once the adapter of that moment is saved, and
waits for a line `continue`; any other answer ends the training. Saving and waiting are off its clock. Imports only the
rewards and the tool of the job from this project.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import IO, Any

sys.path.append(str(Path(__file__).parents[1]))

CHAT_WITH_TOOLS = """
{%- for message in messages %}
    {%- if message.role != "tool" %}
        {{- "<|im_start|>" + message.role + "\n" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "\n" if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + "}\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- else %}
        {{- "<|im_start|>user" if loop.previtem.role != "tool" }}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {{- "<|im_end|>\n" if loop.last or loop.nextitem.role != "tool" }}
    {%- endif %}
{%- endfor %}
{{- "<|im_start|>assistant\n" if add_generation_prompt }}
"""
"""The model's own template has no place for calls and results. The prompts already describe the functions."""


def main() -> None:
    import torch
    from transformers import AutoTokenizer

    # Libraries print to stdout as well, so the protocol uses a copy of it and the libraries get stderr.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model_path"])
    prompt_ids = [row.pop("token_ids") for row in job["rows"]]
    trainer = make_trainer(job, tokenizer, out)
    check_tokens(trainer, job, prompt_ids)
    trainer.train()


def check_tokens(trainer: Any, job: dict[str, Any], prompt_ids: list[list[int]]) -> None:
    """Raise AssertionError if the trainer tokenizes a prompt or the results of a call differently from our side."""
    prompts = [row["prompt"] for row in job["rows"]]
    for prompt, ours, theirs in zip(prompts, prompt_ids, trainer._tokenize_prompts(prompts)[0], strict=True):
        assert ours == theirs, prompt
    for after in job["after_calls"]:
        messages = [{"role": "tool", "name": "look", "content": result} for result in after["results"]]
        assert trainer._get_tool_suffix_ids(messages) == after["token_ids"], messages


def make_trainer(job: dict[str, Any], tokenizer: Any, out: IO[str]) -> Any:
    """Return a trainer that continues from the adapter in the folder `job["adapter"]`."""
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
            control.should_training_stop = sys.stdin.readline().strip() != "continue"

    module = import_module(job["job"])
    if module.TOOLS:
        tokenizer.chat_template, tokenizer.response_template = CHAT_WITH_TOOLS, qwen3_template
    base = AutoModelForCausalLM.from_pretrained(job["model_path"], dtype=job["dtype"])
    return GRPOTrainer(
        model=PeftModel.from_pretrained(base, job["adapter"], is_trainable=True),
        reward_funcs=module.rewards,
        tools=list(module.TOOLS) or None,
        args=settings(job, max_calls=module.MAX_CALLS),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )


def settings(job: dict[str, Any], *, max_calls: int) -> Any:
    """Return TRL's settings, chosen to be fast on a CPU: one batch of completions, no reference model, no logs."""
    from trl import GRPOConfig

    per_step = job["groups"] * job["group_size"]
    return GRPOConfig(
        output_dir=job["output_dir"],
        use_cpu=True,
        bf16=job["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        loss_type="dapo",
        beta=0.0,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=job["max_grad_norm"],
        num_generations=job["group_size"],
        generation_batch_size=per_step,
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=per_step // job["microbatch"],
        max_tool_calling_iterations=max_calls or None,
        max_completion_length=job["max_tokens"],
        temperature=job["temperature"],
        top_p=1.0,
        top_k=0,
        max_steps=10_000,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=job["seed"],
    )


if __name__ == "__main__":
    main()
