"""Who runs attempts: a solver, at tasks over any engine, and a worker, at groups over one that is trained."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec import structs

from configs.envs import BASE_GENERATOR_TOKENS
from configs.learner import FileConfig, TeacherConfig
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.families import FAMILIES, PlanStep
from envs.datasets.generated import GeneratedTask, plan_of
from envs.tools.toolbox import AskModel, Toolbox
from envs.types import Task
from rollout.agent.agent import Agent, TurnListener, build_chat
from rollout.agent.custom import CustomAgent, build_solving, rules_of
from rollout.agent.demonstrations import GROUP_ID, OWN_ID, load_teacher, read_conversations, recorded_trajectory
from rollout.chat import Chat, ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import Teach, TeacherWriter, Writer, engine_writers
from rollout.engines.engine import Engine
from rollout.engines.vllm import VllmEngine
from rollout.engines.wrappers import (
    DemonstrationEngine,
    LockstepEngine,
    ReplayEngine,
    SeededEngine,
    demonstrated_plans,
    frozen_model,
    stream_seed,
)
from rollout.guide import Guide, ScoreSteps
from rollout.memory import EpisodicMemory, MemoryUnavailableError
from rollout.types import Group, StepScores, Trajectory, Turn

if TYPE_CHECKING:
    from envs.sandbox import SandboxState
    from rollout.engines.base_weights import ExportedBase

AnyAgent: TypeAlias = Agent | CustomAgent
_log = logging.getLogger(__name__)


async def run_group(agents: Sequence[AnyAgent], task: Task, group_id: str, *, part: str = "", hints: str = "") -> Group:
    """Run a trajectory of each agent at `task`, all with the same hints, so that they can be compared."""
    attempts = (
        agent.run(task, trajectory_id=f"{group_id}/{part}{index}", group_id=group_id, hints=hints)
        for index, agent in enumerate(agents)
    )
    return Group(id=group_id, trajectories=tuple(await asyncio.gather(*attempts)))


class Solver:
    """Runs attempts with a toolbox, or with the model endpoint of a custom agent.

    More than `max_open` attempts at a time only wait; `own_model` calls the frozen base model.
    """

    def __init__(
        self, config: RunConfig, engine: Engine, chat: Chat, *, max_open: int, own_model: AskModel | None = None
    ) -> None:
        self._config = config
        self._engine = engine
        self._chat = chat
        self._toolbox: Toolbox | None = None
        self._endpoint = Endpoint()
        if isinstance(config.agent, PlannerAgentConfig):
            self._toolbox = Toolbox(config.envs, own_model=own_model)
        else:
            self._solving = build_solving(config.agent, config.code_path)
        memory = config.planner.memory
        self._memory = None if memory.type == "none" else EpisodicMemory(memory)
        self.max_open = max_open

    @property
    def sandbox(self) -> "SandboxState | None":
        return self._toolbox.sandbox if self._toolbox else None

    def close(self) -> None:
        self._endpoint.close()
        if self._toolbox is not None:
            self._toolbox.close()
        if self._memory is not None:
            self._memory.close()

    async def attempt(
        self,
        task: Task,
        trajectory_id: str,
        *,
        group_id: str,
        temperature: float,
        seed: int,
        on_turn: TurnListener | None = None,
    ) -> Trajectory:
        """Return one attempt at a task, whose random numbers do not depend on other attempts.

        `on_turn` is called for every turn as it happens.
        """
        agent = self._build_agent(SeededEngine(self._engine, seed), temperature)
        hints = ""
        if self._memory is not None and self._memory.in_evaluation:
            # Its errors are raised: evaluations that only sometimes have hints cannot be compared.
            hints = await self._memory.hints(task)
        return await agent.run(task, trajectory_id=trajectory_id, group_id=group_id, on_turn=on_turn, hints=hints)

    def _build_agent(self, engine: Engine, temperature: float) -> AnyAgent:
        if self._toolbox is None:
            return self._build_own_agent(engine_writers(engine, temperature))
        return Agent(
            config=self._config,
            engine=engine,
            chat=self._chat,
            tools_for_episode=self._toolbox.episode,
            temperature=temperature,
        )

    def following(self, plan: Sequence[PlanStep]) -> Agent:
        """Return the planner that decides by a plan. Rules replace the verifier and the generator, which have none."""
        assert isinstance(self._chat, ChatFormat)
        agent = self._build_agent(DemonstrationEngine(self._chat, plan), 1.0)
        assert isinstance(agent, Agent)
        planner = self._config.planner.model_copy(update={"verifier": "rule", "generator": "rule"})
        return replace(agent, config=self._config.model_copy(update={"agent": planner}))

    def taught(self, teach: Teach, name: str) -> CustomAgent:
        """Return the custom agent whose model is a teacher."""
        chat = self._chat
        assert isinstance(chat, ChatFormat)
        return self._build_own_agent(lambda task, own_id: TeacherWriter(teach, name, task, chat))

    def _build_own_agent(self, writer: Callable[[Task, str], Writer]) -> CustomAgent:
        assert isinstance(self._chat, ChatFormat)
        return CustomAgent(
            self._solving,
            self._endpoint,
            writer=writer,
            chat=self._chat,
            rules=rules_of(self._config),
            limits=self._config.rollout,
        )


class Worker(Solver):
    """Owns an engine that can be trained, on `base` weights that another process holds or on its own."""

    def __init__(self, config: RunConfig, model_path: Path, *, index: int, base: "ExportedBase | None" = None) -> None:
        in_lockstep = config.in_lockstep
        self.engine = VllmEngine(
            model_path,
            config.rollout.engine,
            config.model,
            seed=stream_seed(config.seed, "engine", index),
            in_lockstep=in_lockstep,
            base=base,
        )
        self._own_chat = build_chat(model_path)
        frozen = frozen_model(self.engine, self._own_chat, BASE_GENERATOR_TOKENS)
        max_open = 2 * config.rollout.engine.max_num_seqs
        super().__init__(config, self.engine, self._own_chat, max_open=max_open, own_model=frozen)
        self._lockstep = LockstepEngine(self.engine, seed=config.seed) if in_lockstep else None
        self._agent = self._build_agent(self._lockstep or self.engine, config.rollout.temperature)

    def close(self) -> None:
        self.engine.close()
        super().close()

    def begin_round(self, num_groups: int) -> None:
        """Announce that exactly this number of groups runs next, for a run in lockstep."""
        if self._lockstep is not None:
            self._lockstep.begin_round(num_groups * self._config.rollout.group_size)

    async def hints(self, task: Task) -> str:
        """Return what the memory says about a task, for all attempts of a group."""
        if self._memory is not None:
            try:
                return await self._memory.hints(task)
            except MemoryUnavailableError as error:
                # The whole group does without them, and so stays comparable.
                _log.warning("a group of task %s has no hints: %s", task.id, error)
        return ""

    async def run_group(self, task: Task, group_id: str, group_size: int, hints: str) -> Group:
        return await run_group([self._agent] * group_size, task, group_id, hints=hints)

    async def run_guided(self, task: Task, group_id: str, guides: Sequence[Guide], hints: str) -> Group:
        """Run further attempts for a group, whose decisions the guides choose."""
        agents = [replace(self._agent, guide=guide) for guide in guides]
        return await run_group(agents, task, group_id, part="guided/", hints=hints)

    async def remember(self, solved: Sequence[Trajectory]) -> None:
        """Keep what trajectories that were right in training did, where the recipe asks for it."""
        if self._memory is None:
            return
        for trajectory in solved:
            try:
                await self._memory.remember(trajectory)
            except MemoryUnavailableError as error:
                _log.warning("trajectory %s is not remembered: %s", trajectory.id, error)

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> Group:
        """Run a group outside of training, at the temperature of collecting, and the teacher's attempt at its task.

        A PRM must know the right steps that the policy does not make yet.
        """
        agent = self._build_agent(self.engine, self._config.collect.temperature)
        group = await run_group([agent] * group_size, task, group_id)
        # A group without any attempt of the policy is collected again, so it gets no teacher's attempt.
        sampled = any(one.stop_reason != "infrastructure" for one in group.trajectories)
        if sampled and (teacher := self._teacher_of(task)):
            taught = await teacher.run(task, trajectory_id=f"{group_id}/teacher", group_id=group_id)
            group.trajectories = (*group.trajectories, taught)
        return group

    def _teacher_of(self, task: Task) -> AnyAgent | None:
        """Return the agent that follows the recipe's teacher or, in the planner, the plan of a generated task."""
        if isinstance(self._config.cold_start, TeacherConfig):
            return self.taught(load_teacher(self._config.cold_start), self._config.cold_start.function)
        if self._toolbox and task.dataset in FAMILIES:
            return self.following(plan_of(task))
        return None

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        """Return `count` new ends of a trajectory after its first `num_turns` planner turns, sampled as in training.

        Replayed turns are not trained on. One whose replay differs from the record is left out.
        """
        recorded = trajectory.planner_turns[:num_turns]

        async def run(index: int) -> Trajectory:
            own_id = f"{trajectory.id}+{num_turns}/{index}"
            engine = ReplayEngine(self.engine, trajectory.planner_turns, num_turns)
            agent = self._build_agent(engine, self._config.rollout.temperature)
            end = await agent.run(trajectory.task, trajectory_id=own_id, group_id=trajectory.group_id)
            return as_replay(end, recorded)

        ends = await asyncio.gather(*map(run, range(count)))
        return [end for end in ends if repeats(end, trajectory, num_turns)]

    async def search(
        self, trajectory: Trajectory, num_turns: int, group_id: str, score_steps: ScoreSteps, candidates: int
    ) -> tuple[list[Trajectory], int]:
        """Make a guided attempt that begins with the first `num_turns` planner turns of a trajectory.

        Return it, followed by the decisions without a score as attempts that end there, and the sampled tokens.
        """
        found: list[Trajectory] = []

        async def score(group: Group) -> StepScores:
            scores = await score_steps(group)
            found.extend(one for one, raw in zip(group.trajectories, scores.raw, strict=True) if raw[-1] is None)
            return scores

        guide = Guide(task=trajectory.task, score_steps=score, candidates=candidates)
        engine = ReplayEngine(self.engine, trajectory.planner_turns, num_turns)
        agent = replace(self._build_agent(engine, self._config.rollout.temperature), guide=guide)
        attempt = await agent.run(trajectory.task, trajectory_id=group_id, group_id=group_id)
        named = (structs.replace(one, id=f"{group_id}/{at}", group_id=group_id) for at, one in enumerate(found))
        repeated = sum(turn.num_tokens for turn in trajectory.planner_turns[:num_turns])
        return [attempt, *named], max(0, guide.num_tokens - repeated)  # an agent may not repeat all of them

    async def demonstrate(self, tasks: Sequence[GeneratedTask]) -> list[Trajectory]:
        """Return what the cold start imitates. Raises UserError for unusable conversations.

        These are plans or a teacher's replies, played through the real tools, or the conversations of a file.
        """
        settings = self._config.cold_start
        if isinstance(settings, FileConfig):
            rules, chat, read = rules_of(self._config), self._own_chat, read_conversations(settings.path)
            return [await recorded_trajectory(one, index, chat, rules) for index, one in enumerate(read)]
        places = asyncio.Semaphore(8)

        async def play(index: int, agent: AnyAgent, task: Task) -> Trajectory:
            async with places:
                return await agent.run(task, trajectory_id=OWN_ID.format(index), group_id=GROUP_ID)

        agents: list[AnyAgent]
        if isinstance(settings, TeacherConfig):
            agents = [self.taught(load_teacher(settings), settings.function)] * len(tasks)
        else:
            plans = demonstrated_plans(tasks, settings.lazy_share)
            agents = [self.following(plan) for plan in plans]
        played = (play(index, agent, one.task) for index, (agent, one) in enumerate(zip(agents, tasks, strict=True)))
        return await asyncio.gather(*played)


def as_replay(trajectory: Trajectory, recorded: Sequence[Turn]) -> Trajectory:
    """Return the trajectory with the recorded planner turns first, in the order of the record, and not trainable."""
    places = {(turn.prompt, turn.tokens, turn.logprobs): place for place, turn in enumerate(recorded)}

    def place(turn: Turn) -> int:
        return places.get((turn.prompt, turn.tokens, turn.logprobs), len(recorded))

    ordered = sorted(trajectory.planner_turns, key=place)
    planned = (structs.replace(turn, trainable=turn.trainable and place(turn) == len(recorded)) for turn in ordered)
    return structs.replace(
        trajectory, turns=tuple(next(planned) if turn.role == "planner" else turn for turn in trajectory.turns)
    )


def repeats(replay: Trajectory, original: Trajectory, num_turns: int) -> bool:
    """Return whether the first planner turns of `replay` equal those of `original`.

    The same prompts must have led to the same results, up to a prompt that the original continued with as well. A
    planner that an infrastructure fault stopped earlier repeats what it has; an agent that asked something else repeats
    nothing.
    """
    turns, recorded = replay.planner_turns, original.planner_turns
    if any(
        turn.prompt != other.prompt or turn.tool_result != other.tool_result
        for turn, other in zip(turns[:num_turns], recorded, strict=False)
    ):
        return False
    if len(turns) <= num_turns:
        return replay.stop_reason == "infrastructure" and replay.failure is None
    return turns[num_turns].prompt in {turn.prompt for turn in recorded[num_turns:]}
