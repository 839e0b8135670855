"""TRL's GRPOTrainer on the job of `time_to_skill.py`: `python trl_peer.py JOB.json`, in TRL's environment.

Prints one line of JSON before the first step and after every few steps, once the adapter of that moment is saved, and
waits for a line `continue`; any other answer ends the training. Saving and waiting are off its clock. Imports only the
reward from this project.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

sys.path.append(str(Path(__file__).parents[1]))
from expressions import solved


def rewards(completions: list[str], numbers: list[list[int]], value: list[int], **_: Any) -> list[float]:
    return [solved(*row) for row in zip(completions, numbers, value, strict=True)]


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
    check_tokens(trainer, [row["prompt"] for row in job["rows"]], prompt_ids)
    trainer.train()


def check_tokens(trainer: Any, prompts: list[str], prompt_ids: list[list[int]]) -> None:
    """Raise AssertionError if the trainer tokenizes a prompt differently from the other side."""
    for prompt, ours, theirs in zip(prompts, prompt_ids, trainer._tokenize_prompts(prompts)[0], strict=True):
        assert ours == theirs, prompt


def make_trainer(job: dict[str, Any], tokenizer: Any, out: IO[str]) -> Any:
    """Return a trainer that continues from the adapter in the folder `job["adapter"]`."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer

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

    base = AutoModelForCausalLM.from_pretrained(job["model_path"], dtype=job["dtype"])
    return GRPOTrainer(
        model=PeftModel.from_pretrained(base, job["adapter"], is_trainable=True),
        reward_funcs=rewards,
        args=settings(job),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )


def settings(job: dict[str, Any]) -> Any:
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
