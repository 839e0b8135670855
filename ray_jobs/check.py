"""`agentflow check`: what a run would meet first, without an engine: tasks, reward, tools and attempts."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice

from configs.errors import printable
from configs.learner import TeacherConfig
from configs.loading import render_config
from configs.plugins import OwnCodeError
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.families import FAMILIES, PlanStep
from envs.datasets.generated import GeneratedTask, rl_task
from envs.datasets.sampler import cold_start_tasks, evaluation_tasks, training_tasks
from envs.tools.closing import until_closed
from envs.types import Task
from ray_jobs.plan import GIB, make_plan
from ray_jobs.run.origin import trains_prm
from ray_jobs.run.preflight import Ready, check_before_start
from ray_jobs.run.task_checks import notes_before_start
from reward.judging import OutcomeReward
from reward.scorers import score_answer
from reward.scorers.custom import reads_turns
from reward.scorers.process import ScoringError
from reward.scorers.text import aliases
from rollout.agent.agent import build_chat
from rollout.agent.demonstrations import load_teacher
from rollout.engines.wrappers import DemonstrationEngine
from rollout.types import Trajectory
from rollout.worker import AnyAgent, Solver

NUM_PLAYED = 2
"""Attempts that are shown: those with the highest scores and the most calls."""
NUM_SCORED = 8
"""Tasks whose reference answers are scored, and at which a teacher plays."""
WRONG = "no answer of this task"


def run_check(config: RunConfig, *, print_settings: bool = False) -> int:
    """Make the checks of a start, and print what a run would meet first. Return 1 if it cannot learn or run."""
    write = partial(print, file=sys.stderr if print_settings else sys.stdout)
    if print_settings:
        print(render_config(config), end="", flush=True)
    ready = check_before_start(config, with_prm=trains_prm(config), download=False)
    first = list(islice(_first_tasks(config), NUM_SCORED))
    tasks = [one.task for one in first]
    # A teacher may give up at some tasks, and other attempts differ little from each other.
    taught = isinstance(config.cold_start, TeacherConfig)
    played = asyncio.run(until_closed(_play(config, ready, first if taught else first[:NUM_PLAYED])))
    problems = []
    if ready.sandbox is not None:
        write(f"sandbox   {ready.sandbox}")
    for subject, found in (
        ("tasks", _tasks(config, tasks)),
        ("reward", _reward(tasks)),
        ("attempts", _attempts(config, played)),
        ("memory", _memory(config)),
    ):
        for text, is_problem in found:
            write(f"{'problem' if is_problem else subject:<9} {printable(text)}")
            problems += [text] * is_problem
    if problems:
        write(f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}: the run would fail or learn nothing")
        return 1
    write(
        f"OK: {config.num_steps} train steps of {config.batch_groups} groups of {config.rollout.group_size} attempts; "
        f"the run's folder is {config.run_path}"
    )
    return 0


Found = Iterator[tuple[str, bool]]
"""Lines, and whether each is a problem."""


def _first_tasks(config: RunConfig) -> Iterator[GeneratedTask]:
    """Yield the tasks that training draws, until one comes again, with their plans where they have one."""
    sampler, seen = training_tasks(config), set[str]()
    for ordinal in count():
        task = sampler.task(ordinal)
        if task.id in seen:
            return
        seen.add(task.id)
        generated = task.dataset in FAMILIES
        plan = rl_task(task.dataset, ordinal=ordinal, seed=config.seed).plan if generated else ()
        yield GeneratedTask(task=task, plan=plan)


def _tasks(config: RunConfig, tasks: Sequence[Task]) -> Found:
    sizes = training_tasks(config).sizes
    names = ", ".join(f"{name} ({sizes[name]} tasks)" if name in sizes else name for name in config.envs.mix)
    held_out = _found(len(evaluation_tasks(config)), config.evaluation.num_tasks)
    yield f"trained on {names}; {held_out} held out; the first: {tasks[0].question:.120}", False
    if isinstance(config.cold_start, TeacherConfig):
        asked = config.cold_start.num_demonstrations
        yield f"the teacher plays {_found(len(cold_start_tasks(config)), asked)} other tasks", False
    for note in notes_before_start(config):
        yield note, False
    others = [name for name in config.envs.mix if name not in FAMILIES]
    searches = isinstance(config.agent, PlannerAgentConfig) and "search" in config.envs.actions
    if others and searches and config.envs.search == "offline":
        yield (
            f"envs.search = 'offline' knows only the catalogue of the generated tasks, and nothing of {others[0]}; "
            "take 'search' out of envs.actions, or set envs.search=tavily",
            True,
        )


def _found(num: int, asked: int) -> str:
    return f"{num}, not {asked}," if num < asked else str(num)


def _reward(tasks: Sequence[Task]) -> Found:
    """Score the reference answers, those of other tasks, and an empty one."""
    answers = set(map(_reference, tasks))
    differ = False
    for number, task in enumerate(tasks):
        right = _reference(task)
        wrong = next((one for one in sorted(answers) if one != right), WRONG)
        try:
            scores = [score_answer(task, answer) for answer in (right, wrong, "")]
        except (ScoringError, OwnCodeError, ValueError) as error:
            # A function may fail at an answer that no attempt gives. What it returns must be a score for any answer.
            yield f"the reward of {task.id}: {error}", " returned " in str(error)
            return
        differ |= scores[0] != scores[1]
        if number == 0:
            names = ("reference answer", "wrong answer", "empty answer")
            shown = zip(scores, names, (right, wrong, ""), strict=True)
            yield ", ".join(f"{score} for the {name} {answer!r:.40}" for score, name, answer in shown), False
    # The references of other scorers are checked before, and the one of a game is no answer.
    custom = [task.scorer for task in tasks if task.scorer and ":" in task.scorer]
    if custom and not differ and not any(map(reads_turns, custom)):
        yield (
            f"the reward of the reference answer is that of a wrong one in all of {len(tasks)} tasks: nothing to learn",
            True,
        )


def _reference(task: Task) -> str:
    """Return the reference answer; of several that a data set's comparison accepts, the first."""
    return task.answer if ":" in (task.scorer or "") else next(iter(aliases(task.answer)), "")


async def _play(config: RunConfig, ready: Ready, tasks: Sequence[GeneratedTask]) -> list[Trajectory]:
    """Play each task once through the real agent, endpoint, tools and sandbox, with scripted replies."""

    async def own_model(prompt: str) -> str:
        return "ok"

    async def answer(task: Task, messages: object, tools: object) -> dict[str, str]:
        return {"role": "assistant", "content": _reference(task) or WRONG}

    chat, played = build_chat(ready.model_path), []
    reward = OutcomeReward(config.learner, max_turn_tokens=config.rollout.max_turn_tokens)
    teacher = config.cold_start if isinstance(config.cold_start, TeacherConfig) else None
    silent = DemonstrationEngine(chat, ())
    with contextlib.closing(Solver(config, silent, chat, max_open=1, own_model=own_model)) as solver:
        for one in tasks:
            agent: AnyAgent
            if isinstance(config.agent, PlannerAgentConfig):
                agent = solver.following(one.plan or _every_tool(config, one.task))
            else:
                agent = solver.taught(load_teacher(teacher) if teacher else answer, "the scripted model")
            with _logged() as messages:
                trajectory = await agent.run(one.task, trajectory_id=f"check/{one.task.id}", group_id="check")
            trajectory.failure = trajectory.failure or next(iter(messages), None)
            with contextlib.suppress(OwnCodeError):
                trajectory.reward = await asyncio.to_thread(reward.score, trajectory)
            played.append(trajectory)
    return played


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what attempts log, instead of printing it."""
    log, messages = logging.getLogger("rollout"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.propagate = False
    try:
        yield messages
    finally:
        log.propagate = True
        log.removeHandler(handler)


def _every_tool(config: RunConfig, task: Task) -> list[PlanStep]:
    """Return a plan that calls each tool once with the question, and then gives the reference answer."""
    actions = [action for action in config.envs.actions if action not in ("think", "answer")][
        : config.planner.max_steps - 1
    ]
    calls = [(action, "6 * 7" if action == "code" else task.question) for action in actions]
    return [
        PlanStep(thought="", action=action, action_input=text)
        for action, text in (*calls, ("answer", _reference(task) or WRONG))
    ]


def _attempts(config: RunConfig, played: Sequence[Trajectory]) -> Found:
    longest = max((len(turn.dialogue) // 4 for one in played for turn in one.planner_turns), default=0)
    limit, is_taught = config.rollout.engine.max_model_len, isinstance(config.cold_start, TeacherConfig)
    calls = {one.id: [turn.tool_call.name for turn in one.planner_turns if turn.tool_call] for one in played}
    ranked = sorted(played, key=lambda one: (one.outcome or 0.0, len(calls[one.id])), reverse=True)
    for one in ranked[:NUM_PLAYED]:
        tools = ", ".join(calls[one.id]) or "none"
        yield f"{one.task.id}: {len(one.planner_turns)} replies, tools {tools}, score {one.outcome}", False
    for one in ranked:
        if one.stop_reason not in ("answered", "verified"):
            # A teacher's failed attempts are left out, and a plan of every tool may be longer than an attempt.
            is_problem = not is_taught and one.stop_reason in ("failed", "infrastructure")
            yield f"the attempt at {one.task.id} failed: {one.failure or one.stop_reason}", is_problem
        for turn in one.planner_turns:
            if turn.tool_result and turn.tool_result.error:
                assert turn.tool_call
                yield f"{turn.tool_call.name} answers {turn.tool_result.error}: {turn.tool_result.text:.120}", False
    least = config.cold_start.min_score if isinstance(config.cold_start, TeacherConfig) else float("-inf")
    if is_taught and all(one.outcome is None or one.outcome < least for one in played):
        yield f"none of the teacher's {len(played)} attempts scores cold_start.min_score = {least}", True
    yield f"the longest dialogue has {longest} of rollout.engine.max_model_len = {limit} tokens", False


def _memory(config: RunConfig) -> Found:
    if config.rollout.engine.device == "cuda":
        yield "see `agentflow plan`", False
        return
    plan = make_plan(config, card="A40")
    for card in plan.cards:
        needed = sum(process.num_bytes for process in card.processes) / GIB
        yield f"{needed:.1f} of the {card.num_bytes / GIB:.1f} GiB of {card.name}", False
    yield from ((refusal, True) for refusal in plan.refusals)
