"""Everything can be imported below one name, and another package of one of our names is an error in words."""

import pickle
import subprocess
import sys

from agentflow.learner import advantages as below

from configs import PACKAGES
from learner import advantages
from tests.test_layers import ROOMS, ROOT


def test_all_our_packages_are_below_the_name():
    assert PACKAGES == ROOMS


def test_module_below_the_name_is_the_module_itself():
    assert below is advantages
    assert advantages.__spec__.name == advantages.__name__ == "learner.advantages"


def test_class_has_one_identity_by_both_names():
    from agentflow.rollout.types import Turn as public

    from rollout.types import Turn

    assert public is Turn
    assert pickle.loads(pickle.dumps(public)) is Turn


def run_python(source, *, path):
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=path, env={"PYTHONPATH": f"{path}:{ROOT}"}
    )
    return done.stdout + done.stderr


def test_module_that_does_not_exist_is_missing_by_its_public_name(tmp_path):
    said = run_python("import agentflow.learner.nothing", path=tmp_path)
    assert said.splitlines()[-1] == "ModuleNotFoundError: No module named 'agentflow.learner.nothing'"


def test_package_of_somebody_else_with_one_of_our_names_is_named_with_what_to_do(tmp_path):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    wrong = f"agentflow needs its package 'envs' in {ROOT}, but Python finds {tmp_path}/envs/__init__.py"
    assert f"ImportError: {wrong}" in run_python("import agentflow.envs", path=tmp_path)
    command = run_python("import agentflow; print(agentflow.main())", path=tmp_path)
    assert command.startswith(f"2\nagentflow: error: {wrong}")
    assert len(command.splitlines()) == 2


def test_name_itself_costs_no_heavy_import(tmp_path):
    said = run_python("import agentflow, sys; print({'torch', 'ray', 'pydantic'} & {*sys.modules})", path=tmp_path)
    assert said.strip() == "set()"
