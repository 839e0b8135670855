import subprocess
import sys

import pytest

NOISE = (
    "import logging, os, subprocess, sys\n"
    "from ray_jobs.run.local import quiet_loading\n"
    "with quiet_loading():\n"
    "    print('from Python', file=sys.stderr)\n"
    "    os.write(2, b'from native code\\n')\n"
    "    subprocess.run(['sh', '-c', 'echo from a subprocess >&2'])\n"
    "    logging.basicConfig()\n"
)


def said(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stderr


def test_what_libraries_print_while_something_loads_is_not_shown_and_later_messages_are():
    assert said(f"{NOISE}logging.warning('after')") == "WARNING:root:after\n"


@pytest.mark.parametrize("whom", ["Python", "native code", "a subprocess"])
def test_all_of_it_is_shown_when_loading_fails(whom):
    shown = said(f"{NOISE}    raise ValueError('no model')")
    assert f"from {whom}\n" in shown
    assert shown.endswith("ValueError: no model\n")
