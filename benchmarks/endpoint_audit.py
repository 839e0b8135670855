"""What the model endpoint trains on, against what the engine sampled: an audit of both records, token by token.

    python -m benchmarks.endpoint_audit --turns 2000            # a scripted engine, and every planted fault
    python -m benchmarks.endpoint_audit --turns 300 --real      # the demo model's engine

The engine's own log is written before the endpoint sees a completion. From the training samples only what the loss
mask says is read: each run of trained tokens must be one entry of the log, with its prompt before it, its ids in its
order and its log-probs, and no entry may be found twice.
"""

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import numpy as np
from rollout.agent.own import OwnAgent

from benchmarks.endpoint.attempts import AuditedAgent, LoggingEngine, Sampled, ScriptedSampler
from benchmarks.endpoint.faults import planted_faults, table
from envs.types import Task
from learner.samples import samples_of
from learner.types import TrainingSample
from rollout.chat import ChatFormat
from rollout.endpoint.messages import read_reply
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers
from rollout.engines.engine import Engine
from rollout.types import Trajectory

TEMPERATURE = 1.0
MOVES_EACH = 8


@dataclass
class Audit:
    """Counts of tokens but for the first five. `foreign` stand in no entry of the engine's log, `repeated` in one that
    was trained already; `untrained` were received by the agent and are in no sample, `unreceived` the other way round.
    `wrong_if_retokenised` of the trained ones would be others if their text, or the message that the agent got, were
    tokenised."""

    attempts: int = 0
    calls: int = 0
    branches: int = 0
    failures: list[str] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)
    sampled: int = 0
    trained: int = 0
    foreign: int = 0
    repeated: int = 0
    replies_untrained: int = 0
    replies_unreceived: int = 0
    resends_unequal: int = 0
    replies_changed_by_tokenising: int = 0
    wrong_if_text_is_tokenised: int = 0
    wrong_if_message_is_tokenised: int = 0

    @property
    def clean(self) -> bool:
        faults = (self.foreign, self.repeated, self.replies_untrained, self.replies_unreceived, self.resends_unequal)
        return not self.failures and not any(faults)


class Auditor:
    """Adds up what it finds, attempt by attempt."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.audit = Audit()

    def check(self, log: Sequence[Sampled], samples: Iterable[TrainingSample], *, num_received: int) -> None:
        """Of one attempt."""
        audit = self.audit
        audit.attempts += 1
        audit.calls += len(log)
        audit.sampled += sum(len(one.token_ids) for one in log)
        left = Counter(_key(one.prompt, one.token_ids, one.logprobs) for one in log)
        known = set(left)
        num_trained = 0
        for sample in samples:
            audit.branches += 1
            for start, end in _trained_runs(sample):
                num_trained += 1
                run = sample.token_ids[start:end].tolist()
                key = _key(sample.token_ids[:start].tolist(), run, sample.rollout_logprobs[start:end].tolist())
                audit.trained += len(run)
                audit.foreign += 0 if key in known else len(run)
                audit.repeated += len(run) if key in known and not left[key] else 0
                left[key] -= 1
                self._tokenise_again(run)
        audit.replies_untrained += max(0, num_received - num_trained)
        audit.replies_unreceived += max(0, num_trained - num_received)

    def _tokenise_again(self, run: list[int]) -> None:
        """As a trainer would that keeps the text of a reply, or the message, and not its ids."""
        ids = run[:-1] if run[-1] == self._tokenizer.eos_token_id else run
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        by_text = _num_wrong(ids, self._encode(text))
        self.audit.replies_changed_by_tokenising += by_text > 0
        self.audit.wrong_if_text_is_tokenised += by_text
        self.audit.wrong_if_message_is_tokenised += _num_wrong(ids, self._encode(read_reply(text).text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return ids


def _key(prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Any, ...]:
    return tuple(prompt), tuple(token_ids), np.asarray(logprobs, dtype=np.float32).tobytes()


def _trained_runs(sample: TrainingSample) -> Iterator[tuple[int, int]]:
    """Positions of the trained tokens, as runs that no other token divides."""
    for trained, run in groupby(range(len(sample.loss_mask)), key=lambda at: bool(sample.loss_mask[at])):
        if trained:
            places = [*run]
            yield places[0], places[-1] + 1


def _num_wrong(sampled: list[int], tokenised: list[int]) -> int:
    """Sampled tokens that have no place in the other sequence."""
    if sampled == tokenised:
        return 0
    blocks = SequenceMatcher(None, sampled, tokenised, autojunk=False).get_matching_blocks()
    return len(sampled) - sum(block.size for block in blocks)


async def audited(
    engine: Engine, tokenizer: Any, *, num_turns: int, at_once: int = 64, max_tokens: int = 48, seed: int = 0
) -> tuple[Audit, Trajectory]:
    """Attempts until the engine was called `num_turns` times, and the last of them."""
    logging_engine, endpoint = LoggingEngine(engine), Endpoint()
    client = AuditedAgent(logging_engine, MOVES_EACH, seed, max_tokens)
    rules = Rules(
        model="policy", temperature=TEMPERATURE, override=False, max_tokens=max_tokens, max_context_tokens=8192
    )
    agent = OwnAgent(
        client,
        endpoint,
        writer=engine_writers(logging_engine, TEMPERATURE),
        chat=ChatFormat(tokenizer),
        rules=rules,
        timeout_s=7200,
    )
    auditor, numbers, kept = Auditor(tokenizer), iter(range(10**9)), []

    async def attempts() -> None:
        while sum(logging_engine.begun.values()) < num_turns:
            name = f"attempt-{next(numbers)}"
            task = Task(id=name, dataset="audit", question="What is 17 + 25?", answer="42")
            trajectory = await agent.run(task, trajectory_id=name, group_id="audit")
            kept[:] = [trajectory]
            doings = client.doings[name]
            samples = samples_of(trajectory, [1.0] * len(trajectory.planner_turns), temperature=TEMPERATURE)
            auditor.check(logging_engine.log[name], samples, num_received=len(doings.received))
            auditor.audit.resends_unequal += doings.unequal
            auditor.audit.moves += doings.moves
            auditor.audit.failures += [trajectory.failure] if trajectory.failure else []

    await asyncio.gather(*(attempts() for _ in range(at_once)))
    endpoint.close()
    return auditor.audit, kept[0]


def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    from learner.demo_model import ensure_demo_model

    return AutoTokenizer.from_pretrained(ensure_demo_model())


def demo_engine() -> Any:
    from configs.learner import ModelConfig
    from configs.rollout import EngineConfig
    from learner.demo_model import ensure_demo_model
    from rollout.engines.vllm import VllmEngine

    config = EngineConfig(max_model_len=4096, max_num_seqs=64)
    return VllmEngine(Path(ensure_demo_model()), config, ModelConfig(), seed=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--real", action="store_true", help="sample with the demo model")
    options = parser.parse_args()
    tokenizer = demo_tokenizer()
    engine = demo_engine() if options.real else ScriptedSampler(tokenizer, seed=0)
    audit, _ = asyncio.run(audited(engine, tokenizer, num_turns=options.turns, at_once=options.at_once))
    print(json.dumps(vars(audit), indent=2))
    if options.real:
        engine.close()
    outcomes = [] if options.real else asyncio.run(planted_faults(tokenizer))
    print(table(outcomes))
    sound = audit.clean and all(one.caught for one in outcomes)
    raise SystemExit(0 if sound else "the audit found a fault")


if __name__ == "__main__":
    main()
