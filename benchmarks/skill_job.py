"""The jobs of `time_to_skill.py`, and what the trainer of TRL is told: settings, prompts, and tokens to agree with."""

import json
from pathlib import Path
from typing import Any

from benchmarks import clerk
from benchmarks.trl_environment import trl_settings
from configs.run import RunConfig
from envs.datasets.sampler import training_tasks
from envs.types import Task, ToolCall
from ray_jobs.run.model_folder import resolve_model
from rollout.agent.agent import build_chat
from rollout.chat import ChatFormat
from rollout.endpoint.messages import Said, call_text, turns_of
from rollout.types import Message

JOBS = ("expressions", "clerk")
MICROBATCHES = {"expressions": (1, 4), "clerk": (4, 8)}
"""That TRL tries where nobody says how many. Several replies and their results are long: few do not fit into memory."""
NUM_PROMPTS = 2000
ENDLESS = 10_000
"""Train steps of TRL, which is ended before."""


def recipe(job: str) -> Path:
    return Path(__file__).with_name(f"{job}.toml")


def job_of(config: RunConfig) -> str:
    """Has the name of the tasks that it draws."""
    (job,) = config.envs.mix
    return job


def trl_job(config: RunConfig, adapter: Path, variant: str, *, every: int) -> dict[str, Any]:
    """What `skill_peer.py` reads. `token_ids` are those that our side sends: of each prompt, and between a reply that
    calls and the next one."""
    chat, kind = build_chat(resolve_model(config.model.path)), job_of(config)
    settings = trl_settings(config, variant, autocast=variant.startswith("bfloat16"), steps=ENDLESS, seed=config.seed)
    sampler = training_tasks(config)
    row = {"expressions": _expressions_row, "clerk": _clerk_row}[kind]
    several = {"max_tokens": clerk.MAX_TOKENS, "between": _between(chat)} if kind == "clerk" else {"between": []}
    return {
        **settings,
        **several,
        "kind": kind,
        "adapter": str(adapter),
        "every": every,
        "rows": [row(chat, sampler.task(ordinal)) for ordinal in range(NUM_PROMPTS)],
    }


def _expressions_row(chat: ChatFormat, task: Task) -> dict[str, Any]:
    ids = chat.dialogue([Message(role="user", content=task.question)])
    asked = {key: task.metadata[key] for key in ("numbers", "value")}
    return {"prompt": chat.rendered(ids), "token_ids": list(ids), **asked}


def _clerk_row(chat: ChatFormat, task: Task) -> dict[str, Any]:
    turns = _clerk_turns(task.question)
    prompt = [{"role": turn.role, "content": turn.content} for turn in turns]
    return {"prompt": prompt, "token_ids": list(chat.dialogue(turns)), "answer": task.answer}


def _clerk_turns(question: str) -> list[Message]:
    return turns_of([Said(role="user", content=question)], [json.dumps(clerk.LOOK)])


def _between(chat: ChatFormat) -> list[dict[str, Any]]:
    """After a look at each page, at one that is not there, with an error, and at two at once."""
    pages = [*clerk.PAGES.values(), clerk.UNKNOWN, clerk.result_of("find", "{}")]
    asked = _clerk_turns("?")
    call = call_text(ToolCall(name="look", arguments="{}"))

    def between(results: list[str]) -> dict[str, Any]:
        told = turns_of([Said(role="tool", content=result) for result in results])
        turns = [*asked, Message(role="assistant", content=call), *told]
        ids = chat.continuation(turns, len(asked) + 1, chat.encode_completion(call))
        return {"results": results, "token_ids": list(ids)}

    return [between([page]) for page in pages] + [between(pages[:2])]
