"""The command that begins a project: an agent, a reward, tasks and a recipe that train as they stand."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from configs.errors import UserError

STARTER = Path(__file__).parent / "starter"


class ProjectError(UserError):
    """The folder cannot become a project; the message says why."""


def init(folder: Annotated[Path, Parameter(name="FOLDER", help="a new folder, whose name the run gets")], /) -> None:
    """Write a small project of your own: an agent, its tasks and reward, and a recipe that trains it."""
    from pydantic import ValidationError

    from configs.run import RunConfig
    from configs.wording import reason

    name = folder.absolute().name
    try:
        RunConfig(name=name)
    except ValidationError as error:
        raise ProjectError(f"'{name}' cannot name a run: {reason(error)}") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProjectError(f"'{folder}' is there already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(STARTER.iterdir()):
        if file.is_file():
            (folder / file.name).write_text(file.read_text().replace("PROJECT", name))
    print(f"wrote {folder}: agent.py, warehouse.py (tasks, reward, teacher), recipe.toml")
    print(f"train it: cd {folder} && agentflow train recipe.toml")
