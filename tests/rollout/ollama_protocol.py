"""A local server that speaks Ollama's API as its documentation describes it, and takes nothing else.

Fields, types and status codes follow docs/openapi.yaml and docs/api.md of ollama/ollama (August 2026); `truncate`,
`shift` and `files` stand in its api/types.go. What a model says is scripted.
"""

import json
from contextlib import contextmanager

from tests.envs.local_server import Answer, LocalServer

OPTIONS = {"num_predict", "num_ctx", "temperature", "seed", "top_k", "top_p", "min_p", "repeat_penalty", "stop"}
MESSAGE = {"role", "content"}
CHAT = {"model", "messages", "tools", "format", "options", "stream", "think", "keep_alive", "truncate", "shift"}
SHOW = {"model", "verbose"}


class FieldError(Exception):
    pass


def check_fields(body, fields, required=()):
    if wrong := body.keys() - fields or set(required) - body.keys():
        raise FieldError(f"unknown or missing fields: {sorted(wrong)}")


def said(text, *, done_reason="stop", eval_count=9, **message):
    """The fields of a finished `/api/chat` reply; durations are nanoseconds."""
    return {
        "model": "planner:latest",
        "created_at": "2026-08-21T18:48:22.386406455Z",
        "message": {"role": "assistant", "content": text, **message},
        "done": True,
        "done_reason": done_reason,
        "total_duration": 5_191_566_416,
        "load_duration": 2_154_458,
        "prompt_eval_count": 61,
        "prompt_eval_duration": 383_809_000,
        "eval_count": eval_count,
        "eval_duration": 4_799_921_000,
    }


class ScriptedOllama:
    """`replies` are given out in order: a chat reply, `(status, error)`, or raw bytes. The last one stays."""

    def __init__(self, models=("planner:latest",)):
        self.models = set(models)
        self.replies = [said("{}")]
        self.chats = []
        self.faults = []
        self.headers = []

    def answer(self, method, path, raw):
        route = {
            ("POST", "/api/show"): self._show,
            ("POST", "/api/chat"): self._chat,
        }.get((method, path))
        if route is None:
            return 404, "404 page not found"
        try:
            return route(json.loads(raw))
        except FieldError as error:
            self.faults.append(str(error))
            return 400, {"error": str(error)}

    def _known(self, name):
        return (name if ":" in name else f"{name}:latest") in self.models

    def _show(self, body):
        check_fields(body, SHOW, required=("model",))
        if not self._known(body["model"]):
            return 404, {"error": f"model '{body['model']}' not found"}
        return 200, {"details": {"format": "gguf"}, "model_info": {}, "capabilities": ["completion"]}

    def _chat(self, body):
        check_fields(body, CHAT, required=("model", "messages"))
        check_fields(body.get("options", {}), OPTIONS)
        for message in body["messages"]:
            check_fields(message, MESSAGE, required=("role", "content"))
        self.chats.append(body)
        if not self._known(body["model"]):
            return 404, {"error": f"model '{body['model']}' not found"}
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, tuple):
            return reply[0], {"error": reply[1]}
        return 200, reply


@contextmanager
def serving(script):
    """Serve a script and yield its address. Its answers are a status and a body."""

    def answer(request):
        script.headers.append(request.headers)
        status, reply = script.answer(request.method, request.path, request.body)
        content = b"" if reply is None else reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        return Answer(status, {"Content-Type": "application/json; charset=utf-8"}, content)

    with LocalServer(answer) as server:
        yield server.url
