"""A local server that speaks the chat-completions protocol from a script."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from configs.reward import JudgeConfig


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


class FakeChatServer:
    """The last answer repeats. A callable among the answers receives the request's body."""

    def __init__(self, *answers, port=0):
        self.requests = []
        self._answers = list(answers) or [Answer()]
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path, authorization, body):
        with self._lock:
            self.requests.append((path, authorization, body))
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return answer(body) if callable(answer) else answer

    def _handler(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = fake._answer(self.path, self.headers["Authorization"], body)
                time.sleep(answer.delay_s)
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(answer.body)))
                self.send_header("Content-Type", "application/json")
                # Without it the openai client pauses for half a second before it retries.
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(answer.body[: len(answer.body) // 2] if answer.cut else answer.body)

            def log_message(self, *_):
                pass

            def handle(self):
                # A client that reached its time limit has left.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    super().handle()

        return Handler


def judge_config(server, **settings):
    url = server if isinstance(server, str) else server.url
    return JudgeConfig(**{"base_url": url, "model": "judge-1", **settings})
