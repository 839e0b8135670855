"""A scripted policy for evaluations: the real agent, tools that answer from a table, no model."""

from contextlib import contextmanager
from pathlib import Path

from scripted import decision, make_agent

from configs.loading import load_run_config
from ray_jobs.evaluate import evaluation_items, run_evaluation
from rollout.engines.engine import EngineError

SAMPLE = Path(__file__).parents[1] / "envs" / "benchmark_sample"
SOLUTIONS = {"1 1 4 6": "4*6*1*1", "4 6 6 8": "4+6+6+8"}


def right_answer(task):
    """Return an answer that the scorer accepts."""
    return SOLUTIONS.get(task.answer, task.answer.split("\n")[0].partition(". ")[0])


class ScriptedSolver:
    """A policy whose only decision is `answer_of(task, seed)`. An exception there breaks the engine."""

    max_open = 4

    def __init__(self, answer_of):
        self.answer_of = answer_of
        self.asked = []

    async def attempt(self, task, trajectory_id, *, group_id, temperature, seed):
        self.asked.append((task.dataset, task.id, seed, temperature))
        answer = self.answer_of(task, seed)
        text = answer if isinstance(answer, Exception) else decision("answer", answer)
        return await make_agent([text]).run(task, trajectory_id=trajectory_id, group_id=group_id)


def broken(task, seed):
    return EngineError("gone")


def hesitant(task, answer):
    """Score all answers but one."""
    return None if answer == "unclear" else float(answer == task.answer)


def config_for(tmp_path, *overrides):
    return load_run_config(None, [f"output_dir={tmp_path}", "name=r", f"model.path={model_in(tmp_path)}", *overrides])


def model_in(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 8192}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def evaluate(config, out, *benchmarks, seeds=1):
    """Evaluate on the sample of benchmarks, or on the held-out tasks."""
    items = evaluation_items(config, benchmarks=benchmarks, data=SAMPLE, whole=False)
    return run_evaluation(config, items, adapter=None, num_seeds=seeds, out=out)


def use(monkeypatch, solver):
    """Let commands open this solver instead of a model."""

    @contextmanager
    def open_scripted(config, adapter):
        yield solver

    monkeypatch.setattr("ray_jobs.evaluate.open_worker", open_scripted)
    return solver
