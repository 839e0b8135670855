"""The steps of a learner, alone or as one of several ranks.

`python ranks.py MODEL FOLDER SIZE` runs them in SIZE processes, and leaves the results of each in FOLDER.
"""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import numpy as np
import torch
from tiny import LOSSES, make_samples

from configs.learner import LearnerConfig, ModelConfig
from learner import optim
from learner.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from learner.learner import Learner
from learner.optim import Ranks, join
from learner.packing import build_batch
from tests.changed import replace

CASES = ("dapo", "flow_grpo")
"""Losses."""
MAX_GRAD_NORM = 0.02
"""Clips the gradients of the tiny model."""
MICROBATCH_TOKENS = 12
"""Makes three microbatches of the samples, so that two processes get unequal numbers."""


def make_batch(age=0, broken=()):
    """Return a batch of this age; the samplers' log-probs of the trajectories in `broken` are nan."""
    samples = [replace(one, ages=np.where(one.loss_mask, age, -1)) for one in make_samples()]
    samples = [
        replace(one, rollout_logprobs=one.rollout_logprobs * np.float32("nan")) if one.trajectory_id in broken else one
        for one in samples
    ]
    return build_batch(samples, microbatch_tokens=MICROBATCH_TOKENS)


def make_learner(model_path, loss, *, ranks=None, dtype="float32"):
    config = LearnerConfig(
        loss=LOSSES[loss],
        learning_rate=1e-2,
        microbatch_tokens=64,
        num_threads=1,
        guard=False,
        dtype=dtype,
    )
    return Learner(model_path, ModelConfig(lora_rank=4), config, seed=3, ranks=ranks)


def run_steps(learner, folder):
    """Take supervised and RL steps, some of which are skipped, save a checkpoint and take one more step."""
    steps = [learner.imitate_step(make_samples(), learning_rate=rate) for rate in (1e-2, 5e-3)]
    learner.reset_optimizer(1e-2, warmup_steps=3)
    learner.set_reference()
    steps.append(learner.train_step(make_batch()))
    steps.append(learner.train_step(make_batch(broken="d")))
    steps.append(learner.train_step(make_batch(1)))
    steps.append(learner.train_step(build_batch([], microbatch_tokens=MICROBATCH_TOKENS)))
    save_checkpoint(learner, folder, keep=1)
    return one_more_step(learner, steps)


def one_more_step(learner, steps=()):
    """Take one step, and return the results of all steps and the weights."""
    import safetensors.torch

    steps = [*steps, learner.train_step(make_batch(1))]
    adapter = learner.adapter()
    tensors = sorted(safetensors.torch.load(adapter.data).items())
    return {
        "metrics": [{k: v for k, v in step.metrics.items() if not k.endswith("step_s")} for step in steps],
        "skipped": [step.skipped for step in steps],
        "logprobs": {name: values.tolist() for name, values in steps[-1].learner_logprobs.items()},
        "version": learner.policy_version,
        "digest": adapter.digest,
        "weights": torch.cat([weight.flatten() for _, weight in tensors]),
    }


def main(model_path, folder, size):
    """Fork one process per rank after the slow imports."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401
    import transformers  # noqa: F401

    meeting = socket.create_server(("127.0.0.1", 0))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(model_path, folder, rank, size, meeting)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


def _rank(model_path, folder, rank, size, meeting):
    torch.set_num_threads(1)
    optim.MAX_GRAD_NORM = MAX_GRAD_NORM
    ranks = Ranks(rank=rank, size=size)
    own = meeting if rank == 0 else None
    join(ranks, meeting.getsockname(), device="cpu", own=own, here="127.0.0.1")
    results = {}
    for loss in CASES:
        learner = make_learner(model_path, loss, ranks=ranks)
        results[loss] = run_steps(learner, folder / loss)
        results[loss]["bucket"] = int(learner.optimizer._zero.reduce_bucket_size)
    learner = make_learner(model_path, "dapo", ranks=ranks)
    load_checkpoint(learner, newest_checkpoint(folder.parent / "alone")[0].folder)
    results["resumed"] = one_more_step(learner)
    save_checkpoint(learner, folder / "resumed", keep=1)
    results["twice"] = one_more_step(learner)
    torch.save(results, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
