"""Processes beside a step's own: they answer questions, and may be killed."""

import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing as processes

PATIENCE_S = 300


class Peer:
    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    @classmethod
    def start(cls, target: Callable[..., None], *arguments: Any, forked: bool = False) -> "Peer":
        """`target(pipe, *arguments)` in a process of its own. `forked`: at once, where this one has used neither a card
        nor threads."""
        context = processes.get_context("fork" if forked else "spawn")
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def ask(self, question: str, *arguments: Any) -> Any:
        self.tell(question, *arguments)
        return self.hear()

    def tell(self, question: str, *arguments: Any) -> None:
        """Ask without waiting; `hear` brings the answer."""
        self._pipe.send((question, *arguments))

    def hear(self) -> Any:
        """Raises TimeoutError where no answer comes, and EOFError where the process has died."""
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"no answer in {PATIENCE_S} s")
        return self._pipe.recv()

    def try_ask(self, question: str) -> Any:
        """Its answer, or what went wrong."""
        try:
            return self.ask(question)
        except (OSError, EOFError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    def kill(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGKILL)
        self._process.join()


def serve(pipe: Connection, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer as long as the process lives."""
    while True:
        question, *arguments = pipe.recv()
        pipe.send(answers[question](*arguments))
