"""Rows of a data set of the Hugging Face hub, through its client."""

from typing import Any

from configs.envs import OwnDatasetConfig
from envs.benchmarks.readers import plain_rows
from envs.datasets.own import QUESTIONS

_OURS = ("split", "scorer")
"""What a row of one's own may say, and a column of anybody's data set may not."""


def hub_rows(name: str, config: OwnDatasetConfig) -> list[dict[str, Any]]:
    """The rows of the split that is trained on, then those that are held out, marked as `split` = "eval". `id`,
    `question` and `answer` are as the setting says, the other columns as they are. Raises ValueError, which names the
    setting, where there is no network, no such data set, configuration, split or column."""
    splits = [split for split in (config.split, config.eval_split) if split is not None]
    return [
        {**row, **({"split": "eval"} if split == config.eval_split else {})}
        for split in splits
        for row in _rows_of(name, config, split)
    ]


def _rows_of(name: str, config: OwnDatasetConfig, split: str) -> list[dict[str, Any]]:
    place = f"envs.datasets.{name}"
    table = _table(place, config, split)
    question = config.question or next((name for name in QUESTIONS if name in table.column_names), QUESTIONS[0])
    for setting, column in (("question", question), ("answer", config.answer)):
        if column not in table.column_names:
            raise ValueError(
                f"{place}.{setting} = '{column}' is no column of '{config.hub_id}', which has "
                f"{', '.join(table.column_names)}; name one"
            )
    found = []
    taken = (*_OURS, *QUESTIONS, question, config.answer)
    for number, row in enumerate(plain_rows(table), start=1):
        further = {name: value for name, value in row.items() if name not in taken}
        asked = {question if question in QUESTIONS else "prompt": row.get(question)}
        found.append({**further, **asked, "answer": row.get(config.answer), "id": f"{split}-{number}"})
    return found


def _table(place: str, config: OwnDatasetConfig, split: str) -> Any:
    """A `pyarrow.Table`."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        # As they are stored: pictures and sounds are not decoded.
        return load_dataset(config.hub_id, config.config, split=split).with_format("arrow")[:]
    except Exception as error:
        why = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        said = " ".join(f"{type(why).__name__}: {why}".split())[:300]
        raise ValueError(
            f"{place}: the split '{split}' of '{config.hub_id}' cannot be loaded: {said}; check the names and the "
            "network, and for a gated data set the login of the hub"
        ) from error
