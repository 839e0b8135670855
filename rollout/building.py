"""From configuration to an agent."""

from typing import Any

from configs.rollout import ModuleConfig
from configs.run import RunConfig
from rollout.agent import Agent, AgentSettings, ToolsForEpisode
from rollout.chat import Chat, ChatFormat
from rollout.engine import Engine
from rollout.generator import Generator, ModelGenerator, RuleGenerator
from rollout.planner import PlannerSettings
from rollout.verifier import ModelVerifier, RuleVerifier, Verifier


def build_chat(model_path: Any) -> ChatFormat:
    from transformers import AutoTokenizer

    return ChatFormat(AutoTokenizer.from_pretrained(model_path))


def build_agent(
    config: RunConfig,
    *,
    engine: Engine,
    chat: Chat,
    tools_for_episode: ToolsForEpisode,
    temperature: float,
) -> Agent:
    """The agent that a run's configuration describes, sampling at `temperature` (0: greedy)."""
    rollout = config.rollout
    settings = AgentSettings(
        planner=PlannerSettings(
            actions=config.envs.actions,
            max_steps=rollout.max_steps,
            max_turn_tokens=rollout.max_turn_tokens,
            temperature=temperature,
        ),
        format_retries=rollout.format_retries,
        max_result_chars=config.envs.max_result_chars,
        max_context_tokens=rollout.engine.max_model_len,
        timeout_s=rollout.episode_timeout_s,
    )
    return Agent(
        engine=engine,
        chat=chat,
        settings=settings,
        tools_for_episode=tools_for_episode,
        verifier=_build_verifier(rollout.verifier, engine, chat),
        generator=_build_generator(rollout.generator, engine, chat),
    )


def _build_verifier(config: ModuleConfig, engine: Engine, chat: Chat) -> Verifier:
    return RuleVerifier() if config.kind == "rule" else ModelVerifier(engine, chat, config.max_tokens)


def _build_generator(config: ModuleConfig, engine: Engine, chat: Chat) -> Generator:
    return RuleGenerator() if config.kind == "rule" else ModelGenerator(engine, chat, config.max_tokens)
