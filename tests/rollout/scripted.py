"""Scripted engine, tokenizer and tools for agent tests: no model, no network."""

from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace

from configs.run import RunConfig
from envs.tools.toolbox import AnswerTool, ThinkTool
from envs.types import Task, ToolResult
from rollout.agent.agent import Agent
from rollout.chat import ChatFormat
from rollout.types import Completion


class ScriptedTokenizer:
    """One id per character; `<e>` and `<s>` are special tokens unless they are split on request."""

    eos_token_id = 1
    chat_template = "scripted"
    added_tokens_decoder = MappingProxyType({})

    def apply_chat_template(self, messages, **_):
        return "".join(f"<s>{m['role']}:{m['content']}<e>" for m in messages) + "<s>assistant:"

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(chr(one) for one in token_ids if one > 1 or not skip_special_tokens)

    def __call__(self, text, *, add_special_tokens, split_special_tokens=False):
        ids = []
        while text:
            special = {"<s>": 0, "<e>": 1}.get(text[:3]) if not split_special_tokens else None
            ids.append(ord(text[0]) if special is None else special)
            text = text[1:] if special is None else text[3:]
        return SimpleNamespace(input_ids=ids)


def text_of(token_ids):
    return "".join({0: "<s>", 1: "<e>"}.get(i, chr(i)) for i in token_ids)


class ScriptedEngine:
    """Answers with the given texts in order; a text that ends in `…` is cut by the token limit."""

    policy_version = 3

    def __init__(self, texts):
        self.texts = list(texts)
        self.requests = []
        self.released = []

    async def generate(self, request):
        self.requests.append(request)
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        cut = text.endswith("…")
        text = text.removesuffix("…")
        ids = tuple(map(ord, text)) + (() if cut else (1,))
        return Completion(
            token_ids=ids,
            logprobs=tuple(-0.5 for _ in ids),
            text=text,
            finish_reason="length" if cut else "stop",
            policy_version=self.policy_version,
        )

    def release(self, trajectory_id):
        self.released.append(trajectory_id)


class ScriptedTool:
    """Answers from a table; an exception in it is raised, and a result is given as it is."""

    def __init__(self, name, answers):
        self.name = name
        self.description = f"scripted {name}"
        self.answers = answers

    async def call(self, arguments):
        answer = self.answers[arguments]
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, ToolResult) else ToolResult(text=answer)


def decision(action, action_input, thought="t"):
    return f'{{"thought":"{thought}","action":"{action}","action_input":"{action_input}"}}'


def make_task(question="What is 6*7?", answer="42"):
    return Task(id="task-1", dataset="lookup", question=question, answer=answer)


def make_agent(texts, *, tools=None, max_steps=3, format_retries=1, max_context_tokens=100_000, timeout_s=5):
    @contextmanager
    def tools_for_episode():
        yield [ThinkTool(), AnswerTool(), *(tools or [ScriptedTool("code", {"6*7": "42"})])]

    config = {
        "agent": {"max_steps": max_steps, "format_retries": format_retries},
        "envs": {"max_result_chars": 200},
        "rollout": {
            "max_turn_tokens": 64,
            "episode_timeout_s": timeout_s,
            "engine": {"max_model_len": max_context_tokens},
        },
    }
    return Agent(
        config=RunConfig.model_validate(config),
        engine=ScriptedEngine(texts),
        chat=ChatFormat(ScriptedTokenizer()),
        tools_for_episode=tools_for_episode,
        temperature=1.0,
    )


async def run(agent, task=None):
    return await agent.run(task or make_task(), trajectory_id="g/0", group_id="g")
