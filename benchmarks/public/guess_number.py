"""An environment of the verifiers library with several turns: find a number by asking whether it is higher or lower."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class GuessNumberData(vf.TaskData):
    number: int


class GuessNumberTask(vf.Task[GuessNumberData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(guess_in(trace.last_reply) == self.data.number)


class GuessNumberTasksetConfig(vf.TasksetConfig):
    highest: int = 400


class GuessNumberTaskset(vf.Taskset[GuessNumberTask, GuessNumberTasksetConfig]):
    def load(self) -> Iterator[GuessNumberTask]:
        """A number for each task, close to what the prompt names."""
        for start in range(1, self.config.highest + 1):
            number = random.Random(f"guess {start}").randint(start, start + 7)
            prompt = f"Guess a whole number from {start} to {start + 7}. Reply with the number alone."
            yield GuessNumberTask(GuessNumberData(prompt=prompt, number=number), self.config.task)


class GuessNumberConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    max_guesses: int = 3


class GuessNumber(vf.Env[GuessNumberConfig]):
    async def run(self, task: GuessNumberTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as play:
            reply = await play.turn()
            for _ in range(self.config.max_guesses - 1):
                if reply.terminated or (hint := _hint(guess_in(reply.last_reply), task.data.number)) is None:
                    return
                reply = await play.turn(hint)


def guess_in(text: str) -> int | None:
    found = re.fullmatch(r"\D*([0-9]{1,4})\D*", text)
    return int(found[1]) if found else None


def _hint(guess: int | None, number: int) -> str | None:
    """None for the number itself."""
    if guess is None:
        return "Reply with the number alone."
    return None if guess == number else "Higher." if guess < number else "Lower."


__all__ = ["GuessNumber", "GuessNumberTaskset"]
