"""TRL's GRPOTrainer on the job that `against_trl.py` describes: `python trl_peer.py JOB.json`, in TRL's environment.

Prints one line of JSON. Imports nothing of this project: it runs where only TRL is installed.
"""

import hashlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def coin(text: str) -> float:
    """0 or 1, even chances, decided by the text alone."""
    return float(hashlib.sha256(text.encode()).digest()[0] & 1)


def flip_coins(completions: list[str], **_: Any) -> list[float]:
    return [coin(text) for text in completions]


def main() -> None:
    import torch
    import transformers
    import trl
    from transformers import AutoTokenizer

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model_path"])
    # The trainer tokenises prompts itself: they must come out as the very tokens that the other side sends.
    for prompt in job["prompts"]:
        assert tokenizer(prompt["text"]).input_ids == prompt["token_ids"], prompt["text"]
    ends: list[float] = []
    trainer = make_trainer(job, tokenizer, ends)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "completions/mean_length" in row][1:]

    def mean(name: str) -> float:
        return sum(row[name] for row in logs) / len(logs)

    result = {
        "step_s": [end - start for start, end in pairwise(ends)],
        "trajectories_per_step": job["groups"] * job["group_size"],
        "tokens_per_completion": mean("completions/mean_length"),
        "reward": mean("reward"),
        "without_signal": mean("frac_reward_zero_std"),
        "versions": {one.__name__: one.__version__ for one in (trl, transformers, torch)},
    }
    print(json.dumps(result))


def make_trainer(job: dict[str, Any], tokenizer: Any, ends: list[float]) -> Any:
    """A GRPOTrainer that notes in `ends` when each step, generation and update, was over."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    return GRPOTrainer(
        model=job["model_path"],
        reward_funcs=flip_coins,
        args=settings(job),
        train_dataset=Dataset.from_list([{"prompt": prompt["text"]} for prompt in job["prompts"]]),
        peft_config=LoraConfig(
            r=job["lora_rank"],
            lora_alpha=job["lora_alpha"],
            lora_dropout=0.0,
            target_modules=job["lora_targets"],
            task_type="CAUSAL_LM",
        ),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )


def settings(job: dict[str, Any], **own: Any) -> Any:
    from trl import GRPOConfig

    per_step = job["groups"] * job["group_size"]
    return GRPOConfig(
        output_dir=job["output_dir"],
        model_init_kwargs={"dtype": job["dtype"]},
        use_cpu=True,
        bf16=job["autocast"],
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
        max_steps=job["steps"],
        shuffle_dataset=False,
        logging_steps=1,
        log_completions=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=job["seed"],
        **own,
    )


if __name__ == "__main__":
    main()
