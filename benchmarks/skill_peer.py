"""TRL's GRPOTrainer on the job of `time_to_skill.py`: `python skill_peer.py JOB.json`, in TRL's environment.

Says a line of JSON before the first step and after every so many, once the adapter of that moment is saved, and waits
for `go on`; anything else ends it. Saving and waiting are off its clock. Of this project it imports the reward alone.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from trl_peer import settings

sys.path.append(str(Path(__file__).parents[1]))
from expressions import solved


def main() -> None:
    import torch
    from transformers import AutoTokenizer

    # What libraries print is not for the one who listens.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model_path"])
    # The trainer tokenises prompts itself: they must come out as the very tokens that the other side sends.
    for row in job["rows"]:
        token_ids = row.pop("token_ids")
        assert tokenizer(row["prompt"]).input_ids == token_ids, row["prompt"]
    make_trainer(job, tokenizer, out).train()


def make_trainer(job: dict[str, Any], tokenizer: Any, out: IO[str]) -> Any:
    """It goes on from the adapter in the folder `job["adapter"]`."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer

    def rewards(completions: list[str], numbers: list[list[int]], value: list[int], **_: Any) -> list[float]:
        return [solved(*one) for one in zip(completions, numbers, value, strict=True)]

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

    base = AutoModelForCausalLM.from_pretrained(job["model_path"], dtype=job["dtype"])
    return GRPOTrainer(
        model=PeftModel.from_pretrained(base, job["adapter"], is_trainable=True),
        reward_funcs=rewards,
        args=settings(job),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )


if __name__ == "__main__":
    main()
