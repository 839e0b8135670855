"""From configuration to an agent."""

from pathlib import Path

from configs.rollout import ModuleConfig
from configs.run import RunConfig
from rollout.agent import Agent, AgentSettings, ToolsForEpisode
from rollout.chat import Chat, ChatFormat, ChatTemplateError, chat_pieces
from rollout.engine import Engine
from rollout.generator import Generator, ModelGenerator, RuleGenerator
from rollout.planner import PlannerSettings
from rollout.records import TOKENIZER
from rollout.verifier import ModelVerifier, RuleVerifier, Verifier


def build_chat(model_path: Path) -> ChatFormat:
    """Raises ChatTemplateError."""
    from transformers import AutoTokenizer

    return ChatFormat(AutoTokenizer.from_pretrained(model_path))


def check_chat(model_path: Path) -> None:
    """Whether `build_chat` will do, found out without torch. Raises ChatTemplateError."""
    import transformers

    # Whichever class a tokenizer is of, its template is rendered alike; AutoTokenizer imports torch.
    plain = (model_path / TOKENIZER).is_file()
    loader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(model_path)
    except Exception as error:
        raise ChatTemplateError(f"its tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    chat_pieces(tokenizer)


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
