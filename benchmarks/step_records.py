"""What the records of one train step cost: bytes on disk, and seconds of the driver's two threads.

python -m benchmarks.step_records [--groups 64 --size 8 --turns 5 --tokens 800]
"""

import argparse
import random
import tempfile
import time

import numpy as np
from reward.stored import scored_group_of, stored_group
from rollout.numbers import packed_millionths
from rollout.store.lifecycle import GroupCounts

from configs.run import RunConfig
from envs.types import Task, ToolCall, ToolResult
from learner.credit import CreditedStep, credit_parts
from ray_jobs.run.folder import TRAJECTORIES, RunFolder
from ray_jobs.run.step_records import step_records
from reward.types import Reward, ScoredGroup
from rollout.buffer import Batch
from rollout.types import Completion, Group, Trajectory, Turn

TASK = Task(id="t", dataset="arith", question="What is 6 * 7?", answer="42")
WORDS = ("search", "the", "page", "of", "catalogue", "for", "price", "and", "weight", "these", "goods", "answer")


def make_turn(before: tuple[int, ...], num_tokens: int, rng: np.random.Generator) -> Turn:
    logprobs = -rng.exponential(0.5, num_tokens).astype(np.float32)
    text = " ".join(random.Random(len(before)).choices(WORDS, k=num_tokens))
    return Turn.of(
        role="planner",
        prompt_token_ids=(*before, *map(int, rng.integers(0, 32_000, 40))),
        completion=Completion(
            token_ids=tuple(map(int, rng.integers(0, 32_000, num_tokens))),
            logprobs=tuple(map(float, logprobs)),
            text=text,
            finish_reason="stop",
            policy_version=1,
        ),
        trainable=True,
        thought=text,
        tool_call=ToolCall(name="search", arguments="price of iron bolts"),
        tool_result=ToolResult(text="12 per box"),
    )


def make_group(number: int, options: argparse.Namespace) -> ScoredGroup:
    rng = np.random.default_rng(number)
    trajectories = []
    for index in range(options.size):
        turns: list[Turn] = []
        so_far: tuple[int, ...] = ()
        for _ in range(options.turns):
            turns.append(make_turn(so_far, options.tokens, rng))
            so_far = turns[-1].prompt_token_ids + turns[-1].completion.token_ids
        trajectories.append(
            Trajectory(
                id=f"g{number}/{index}",
                group_id=f"g{number}",
                task=TASK,
                turns=tuple(turns),
                answer="42",
                stop_reason="answered",
            )
        )
    rewards = tuple(Reward(outcome=float(index % 2), total=float(index % 2), parts={}) for index in range(options.size))
    return ScoredGroup(
        group=Group(id=f"g{number}", trajectories=tuple(trajectories)),
        rewards=rewards,
        step_scores=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("groups", 64), ("size", 8), ("turns", 5), ("tokens", 800)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    groups = [make_group(number, options) for number in range(options.groups)]
    started = time.perf_counter()
    payloads = tuple(map(stored_group, groups))
    encoded = time.perf_counter()
    parsed = tuple(map(scored_group_of, payloads))
    read = time.perf_counter()
    assert parsed == tuple(groups)
    batch = Batch(
        step=1,
        payloads=payloads,
        untrained=(),
        version_ages={1: 0},
        facts={},
        bias={},
        counts=GroupCounts(),
        warning=None,
    )
    result = CreditedStep(
        policy_version=2,
        metrics={},
        turn_logprobs={
            one.id: [packed_millionths(np.array(turn.completion.logprobs) + 0.001) for turn in one.turns]
            for scored in groups
            for one in scored.group.trajectories
        },
        credit={scored.group.id: credit_parts(scored, credit="outcome", prm_weight=0.0) for scored in groups},
    )
    with tempfile.TemporaryDirectory(prefix="agentflow-") as parent:
        folder = RunFolder.create(RunConfig(output_dir=parent, name="run"))
        begun = time.perf_counter()
        lines = step_records(batch, payloads, result)
        folder.log_step(1, lines, version_ages=batch.version_ages, num_trained=result.num_trajectories)
        handed_over = time.perf_counter()
        folder.catch_up()
        written = time.perf_counter()
        num_bytes = (folder.path / TRAJECTORIES).stat().st_size
        folder.close()
    num = options.groups * options.size * options.turns * options.tokens
    stored = sum(map(len, payloads)) / num
    print(f"payloads: {stored:.1f} bytes per token, written in {encoded - started:.2f} s by workers")
    print(f"parsing, as the learner does: {read - encoded:.2f} s")
    print(f"loop: {handed_over - begun:.4f} s; records in a thread: {written - begun:.2f} s")
    print(f"{TRAJECTORIES}: {num_bytes / 1e6:.1f} MB, {num_bytes / num:.1f} bytes per token")


if __name__ == "__main__":
    main()
