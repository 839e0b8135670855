"""A local server that speaks the chat-completions protocol from a script."""

import json
import threading
import time

from configs.reward import JudgeConfig
from tests.envs.local_server import Answer as Reply
from tests.envs.local_server import LocalServer


def completion(text="fine", *, read=1000, written=100):
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


class Answer:
    """One scripted answer. `cut` sends only the first half of the body; `delay_s` waits before it."""

    def __init__(self, body=None, *, status=200, delay_s=0.0, cut=False):
        self.status, self.delay_s, self.cut = status, delay_s, cut
        body = completion() if body is None else body
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


def says(text, **usage):
    return Answer(completion(text, **usage))


class FakeChatServer(LocalServer):
    """The last answer repeats. A callable among the answers receives the request's body."""

    def __init__(self, *answers, port=0):
        super().__init__(self._reply, port=port)
        self._answers = list(answers) or [Answer()]
        self._lock = threading.Lock()
        self.url += "/v1"

    def _reply(self, request):
        with self._lock:
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        answer = answer(json.loads(request.body)) if callable(answer) else answer
        time.sleep(answer.delay_s)
        # Without the last one the openai client pauses for half a second before it retries.
        headers = {"Content-Length": str(len(answer.body)), "Content-Type": "application/json", "retry-after-ms": "1"}
        sent = answer.body[: len(answer.body) // 2] if answer.cut else answer.body
        return Reply(answer.status, headers, chunks=[sent])


def judge_config(server, **settings):
    url = server if isinstance(server, str) else server.url
    return JudgeConfig(**{"base_url": url, "model": "judge-1", **settings})
