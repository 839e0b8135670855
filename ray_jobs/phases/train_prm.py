"""Train a process reward model on labelled steps, and write down how good it is on tasks it never saw."""

import os

from configs.run import RunConfig
from ray_jobs.pages.prm import write_prm_page
from ray_jobs.phases.label import NothingCollectedError, label_agreement, read_collected, split_checks
from ray_jobs.run.console import Console
from ray_jobs.run.folder import run_path, write_json
from ray_jobs.run.model_folder import resolve_model
from reward.labels.labels import read_labels
from reward.prm.model import ProcessRewardModel
from reward.prm.quality import evaluate_prm
from reward.prm.training import num_batches, prm_data, train_prm


def run_train_prm(config: RunConfig) -> None:
    """From `collected/` and `labels.jsonl` of the run folder to `prm/`, `prm_quality.json` and `prm_quality.html`."""
    console, folder = Console(), run_path(config)
    collected = read_collected(folder)
    main, checks = split_checks(config.label, read_labels(folder / "labels.jsonl"))
    if not main:
        raise NothingCollectedError(f"'{folder}/labels.jsonl' holds no labels; run `agentflow label` first")
    data = prm_data(collected, main, held_out_share=config.prm.held_out_share)
    os.environ["OMP_NUM_THREADS"] = str(config.prm.num_threads)
    with console.phase("start"):
        base = resolve_model(config.prm.model_path, key="prm.model_path")
        prm = ProcessRewardModel(base, config.prm, seed=config.seed)
    total = num_batches(data.train, num_epochs=config.prm.num_epochs, batch_tasks=config.prm.batch_tasks)
    with console.phase("train_prm", total=total) as progress:
        for loss in train_prm(prm, data.train, seed=config.seed):
            progress.advance(loss=loss)
        prm.save(folder / "prm", num_steps=len(data.train))
    with console.phase("measure it on held-out tasks"):
        quality = evaluate_prm(data, collected, score=prm.score, seed=config.seed)
    quality |= {"digest": prm.digest, "labels": label_agreement(config.label, main, checks)}
    write_json(folder / "prm_quality.json", quality)
    console.note(f"PRM: {folder / 'prm'}; use it with reward.credit.prm_path={folder / 'prm'}")
    console.note(f"quality: {write_prm_page(folder, quality)}")
