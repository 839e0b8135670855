"""TRL's GRPOTrainer on the job that `against_trl.py` describes: `python trl_peer.py JOB.json`, in TRL's environment.

Prints one line of JSON. Imports nothing of this project: it runs where only TRL is installed.
"""

import hashlib
import json
import sys
import time
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
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model_path"])
    # The trainer tokenises prompts itself: they must come out as the very tokens that the other side sends.
    for prompt in job["prompts"]:
        assert tokenizer(prompt["text"]).input_ids == prompt["token_ids"], prompt["text"]

    class Clock(TrainerCallback):
        """When each step ended, generation and update included."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    clock, per_step = Clock(), job["groups"] * job["group_size"]
    trainer = GRPOTrainer(
        model=job["model_path"],
        reward_funcs=flip_coins,
        args=GRPOConfig(
            output_dir=job["output_dir"],
            model_init_kwargs={"dtype": job["dtype"]},
            use_cpu=True,
            bf16=True,
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
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt["text"]} for prompt in job["prompts"]]),
        peft_config=LoraConfig(
            r=job["lora_rank"],
            lora_alpha=job["lora_alpha"],
            lora_dropout=0.0,
            target_modules=job["lora_targets"],
            task_type="CAUSAL_LM",
        ),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    result = {
        "step_s": [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)],
        "trajectories_per_step": per_step,
        "tokens_per_completion": sum(row["completions/mean_length"] for row in logs[1:]) / len(logs[1:]),
        "reward": sum(row["reward"] for row in logs[1:]) / len(logs[1:]),
        "without_signal": sum(row["frac_reward_zero_std"] for row in logs[1:]) / len(logs[1:]),
        "versions": {one.__name__: one.__version__ for one in (trl, transformers, torch)},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
