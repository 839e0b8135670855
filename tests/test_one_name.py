"""The public package name: everything can be imported below `agentflow`."""

import pickle
import subprocess
import sys

from agentflow.learner import credit as below
from agentflow.rollout.types import Turn as PublicTurn

from configs import PACKAGES
from learner import credit
from rollout.types import Turn
from tests.test_layers import ROOMS, ROOT


def test_modules_and_classes_below_the_name_are_the_same_objects():
    assert PACKAGES == ROOMS
    assert below is credit
    assert PublicTurn is Turn
    assert pickle.loads(pickle.dumps(PublicTurn)) is Turn


def run_python(source, *, path):
    environment = {"PYTHONPATH": f"{path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=path, env=environment)
    return done.stdout + done.stderr


def test_package_of_another_project_with_one_of_our_names_is_named(tmp_path):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    assert f"{tmp_path}/envs/__init__.py" in run_python("import agentflow.envs", path=tmp_path)


def test_import_of_the_name_is_light(tmp_path):
    output = run_python("import agentflow, sys; print({'torch', 'ray', 'pydantic'} & {*sys.modules})", path=tmp_path)
    assert output.strip() == "set()"
