"""What a learner goes through in these tests, alone or as one of several processes: `python ranks.py MODEL FOLDER SIZE`
runs it in so many and leaves each one's account in FOLDER."""

import multiprocessing
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tiny import LOSSES, UNGUARDED, make_samples

from configs.learner import LearnerConfig, ModelConfig
from learner.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from learner.learner import Learner
from learner.optim import MeetingPoint, Ranks, join
from learner.packing import build_batch

OBJECTIVES = tuple(LOSSES)
STAGES = (1, 2, 3)
MICROBATCH_TOKENS = 12
"""Makes three microbatches of the samples: two processes get unequal numbers of them, one of four gets none."""


def make_batch(age=0, broken=()):
    """A batch sampled by weights of this age; the samplers' log-probs of some samples are broken."""
    samples = [replace(one, ages=np.where(one.loss_mask, age, -1)) for one in make_samples()]
    samples = [
        replace(one, rollout_logprobs=one.rollout_logprobs * np.float32("nan")) if one.trajectory_id in broken else one
        for one in samples
    ]
    return build_batch(samples, microbatch_tokens=MICROBATCH_TOKENS)


def make_learner(model_path, objective, *, zero_stage=1, ranks=None, dtype="float32"):
    """With weights that no other seed gives, and a gradient norm that is cut."""
    config = LearnerConfig(
        loss=LOSSES[objective],
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.02,
        microbatch_tokens=64,
        num_threads=1,
        guard=UNGUARDED,
        zero_stage=zero_stage,
        dtype=dtype,
    )
    return Learner(
        model_path,
        ModelConfig(lora_rank=4),
        config,
        seed=3,
        ranks=ranks,
    )


def gradient_of(learner):
    """The whole step's, wherever it is."""
    batch = make_batch()
    learner._accumulate(batch.microbatches, lambda rows: learner._rl_loss(rows, batch))
    norm = None
    parameters = learner.policy.trainable_parameters()
    if learner.optimizer.gather(0) == [0]:
        gradient = [parameter.grad for parameter in parameters]
    else:
        from deepspeed.utils import safe_get_full_grad

        norm = learner.optimizer.clipped_norm(0.02)
        gradient = [safe_get_full_grad(parameter) for parameter in parameters]
    gradient = torch.cat([one.flatten() for one in gradient]).clone()
    learner.optimizer.discard()
    return {"gradient": gradient, "norm": float(gradient.norm()) if norm is None else norm}


def account_of(learner, folder):
    """Supervised steps, RL steps of which some are skipped, a checkpoint, and all that can be seen of them."""
    steps = [learner.imitate_step(make_samples(), learning_rate=rate) for rate in (1e-2, 5e-3)]
    learner.reset_optimizer(1e-2, warmup_steps=3)
    learner.set_reference()
    found = gradient_of(learner)
    steps.append(learner.train_step(make_batch()))
    steps.append(learner.train_step(make_batch(broken="d")))
    steps.append(learner.train_step(make_batch(1)))
    steps.append(learner.train_step(build_batch([], microbatch_tokens=MICROBATCH_TOKENS)))
    save_checkpoint(learner, folder, keep=1)
    return found | go_on(learner, steps)


def go_on(learner, steps=()):
    """One more step, and all that can be seen."""
    steps = [*steps, learner.train_step(make_batch(1))]
    adapter = learner.adapter()
    return {
        "metrics": [{k: v for k, v in one.metrics.items() if not k.endswith("step_s")} for one in steps],
        "skipped": [one.skipped for one in steps],
        "logprobs": {name: values.tolist() for name, values in steps[-1].learner_logprobs.items()},
        "version": learner.policy_version,
        "digest": adapter.digest,
        "weights": weights_of(adapter),
    }


def weights_of(adapter):
    import safetensors.torch

    return torch.cat([weight.flatten() for _, weight in sorted(safetensors.torch.load(adapter.data).items())])


@contextmanager
def autocast_seen_as_on_a_card():
    """Asked without a device, torch tells of a card's autocast only. DeepSpeed asks so, and then switches off what it
    was not told of."""
    of_device = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device="cpu": of_device(device)
    try:
        yield
    finally:
        torch.is_autocast_enabled = of_device


def main(model_path, folder, size):
    """One process per rank; a fork knows what was imported here, which takes longest of all."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401
    import transformers  # noqa: F401

    meeting = MeetingPoint("127.0.0.1")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(model_path, folder, rank, size, meeting)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


def _rank(model_path, folder, rank, size, meeting):
    torch.set_num_threads(1)
    ranks = Ranks(rank=rank, size=size)
    own = meeting if rank == 0 else None
    join(ranks, ("127.0.0.1", meeting.port), device="cpu", own=own, here="127.0.0.1")
    accounts = {}
    for objective, stage in product(OBJECTIVES, STAGES):
        learner = make_learner(model_path, objective, zero_stage=stage, ranks=ranks)
        accounts[objective, stage] = account_of(learner, folder / f"{objective}-{stage}")
    for stage in STAGES:
        learner = make_learner(model_path, "dapo", zero_stage=stage, ranks=ranks, dtype="bfloat16")
        with autocast_seen_as_on_a_card():
            accounts["mixed", stage] = gradient_of(learner)
        accounts["bucket", stage] = int(learner.optimizer._zero.reduce_bucket_size)
        learner = make_learner(model_path, "dapo", zero_stage=stage, ranks=ranks)
        load_checkpoint(learner, newest_checkpoint(folder.parent / "alone")[0].folder)
        accounts["resumed", stage] = go_on(learner)
    torch.save(accounts, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
