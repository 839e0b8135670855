"""The two tiers: their choice, their isolation, and their clean-up."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.loading import load_run_config
from envs.sandbox import Sandbox, SandboxSettings, zygote
from envs.sandbox.jail import make_folder, make_scratch, remove_folder
from envs.sandbox.protocol import choose_tier, refusal
from envs.sandbox.warden import too_many_files
from envs.types import ToolResult

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
RESTARTED = "[The interpreter was restarted: names from earlier steps are gone.]\n"


@pytest.fixture(scope="module")
def bare(request: pytest.FixtureRequest, sandbox: Sandbox) -> Iterator[Sandbox]:
    """The tier of `sandbox`, without the import check."""
    with Sandbox(SandboxSettings(tier=sandbox.state.tier, check_imports=False)) as running:
        yield running


def in_throwaway(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command in throw-away namespaces; skip the test on a machine without namespaces."""
    if _ROOT.is_relative_to("/tmp"):
        pytest.skip(f"{_ROOT} lies below /tmp, which is a fresh one in there")
    launcher = [sys.executable, str(_HERE / "throwaway.py"), *map(str, command)]
    done = subprocess.run(launcher, capture_output=True, text=True, cwd=_ROOT, timeout=300)
    if "PermissionError" in done.stderr and "throwaway.py" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    return done


def under_docker_profile(*command: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, str(_HERE / "docker_profile.py"), *map(str, command)]
    return subprocess.run(launcher, capture_output=True, text=True, cwd=_ROOT, timeout=300)


# Choice of a tier


JAIL, LANDLOCK, SECCOMP = {"namespaces": "forbidden"}, {"landlock": "too old"}, {"seccomp": "none"}


@pytest.mark.parametrize(
    ("wanted", "of_namespaces", "of_landlock", "tier"),
    [
        ("auto", {}, {}, "namespaces"),
        ("auto", {}, LANDLOCK, "namespaces"),
        ("auto", JAIL, {}, "landlock"),
        ("auto", JAIL, LANDLOCK, None),
        ("auto", SECCOMP, SECCOMP, None),
        ("landlock", {}, {}, "landlock"),
        ("landlock", {}, LANDLOCK, None),
        ("namespaces", JAIL, {}, None),
    ],
)
def test_the_stronger_tier_is_taken_and_none_is_weakened(
    wanted: Any, of_namespaces: dict[str, str], of_landlock: dict[str, str], tier: str | None
) -> None:
    lacks: Any = {"namespaces": of_namespaces, "landlock": of_landlock}
    assert choose_tier(wanted, lacks) == tier
    if tier is None:
        said = refusal(wanted, lacks)
        for setting in re.findall(r"[a-z_]+(?:\.[a-z_]+)+=\S+", said):
            load_run_config(None, [setting.rstrip(",")])
        assert ("set envs.sandbox=landlock" in said) == (of_landlock == {})


@pytest.mark.parametrize(("version", "usable"), [(0, False), (5, False), (6, True), (7, True)])
def test_the_tier_landlock_needs_a_landlock_that_confines_signals(version: int, usable: bool) -> None:
    lacks = zygote._missing_layers({}, version)
    assert ("landlock" not in lacks["landlock"]) == usable
    assert list(lacks) == ["namespaces", "landlock"]
    assert "landlock" not in lacks["namespaces"]


@pytest.mark.parametrize(("tier", "code", "said"), [("auto", 0, "tier landlock"), ("namespaces", 2, "envs.sandbox=")])
def test_under_dockers_default_profile_only_the_tier_landlock_is_found(tier: str, code: int, said: str) -> None:
    check = ("check", f"envs.sandbox={tier}", "output_dir=/tmp/unused")
    done = under_docker_profile(sys.executable, "-m", "ray_jobs.cli", *check)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True)


def test_the_seccomp_profile_in_deploy_allows_the_tier_of_namespaces(namespaces: None) -> None:
    walls = under_docker_profile(
        *("--seccomp", "deploy/seccomp.json"),
        *(sys.executable, "-c", "from envs.sandbox import Sandbox; print(Sandbox().state)"),
    )
    assert walls.stdout.startswith("tier namespaces")


# Isolation


@pytest.mark.parametrize(
    "configuration",
    ["landlock", "namespaces", "namespaces --without landlock", "namespaces --without seccomp"],
)
def test_no_attack_comes_through_a_tier_nor_through_the_namespaces_without_a_layer(configuration: str) -> None:
    """The attacks run in throw-away namespaces, without the import check, which would hide the walls."""
    done = in_throwaway(sys.executable, _HERE / "attack_tier.py", "--tier", *configuration.split())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["tier"], found["signs"]) == (configuration.split()[0], [])
    assert found["num_attacks"] >= 150


def test_without_namespaces_no_episode_sees_the_hosts_files_or_a_siblings() -> None:
    program = """
        import json, os, tempfile
        from envs.sandbox import Sandbox, SandboxSettings
        host = tempfile.mkdtemp() + "/secret"
        open(host, "w").write("of the host")
        with Sandbox(SandboxSettings(tier="landlock", check_imports=False)) as sandbox:
            with sandbox.episode() as one, sandbox.episode() as other:
                folder = one.run("import os\\nopen('note', 'w').write('of one')\\nprint(os.getcwd(), end='')").text
                def tried(code):
                    return other.run(code).text
                told = {
                    "host": tried(f"open({host!r}).read()"),
                    "host's folder": tried("import os; os.listdir('/tmp')"),
                    "host written": tried(f"open({host!r}, 'a').write('x')"),
                    "host dated": tried(f"import os; os.utime({host!r})"),
                    "host's link": tried("import os; os.readlink('/proc/self/exe')"),
                    "sibling": tried(f"open({folder + '/note'!r}).read()"),
                    "sibling's folder": tried(f"import os; os.listdir({folder!r})"),
                    "sibling written": tried(f"open({folder + '/more'!r}, 'w')"),
                    "all folders": tried(f"import os; os.listdir({os.path.dirname(folder)!r})"),
                }
                own = other.run("import os; open('own', 'w').close(); os.listdir('.')").text
                mode = os.stat(folder).st_mode & 0o777
            left = [name for name in os.listdir(os.path.dirname(folder))]
            one_more = sandbox.run("import os; os.listdir('.')").text
        print(json.dumps([told, own, mode, left, one_more, os.path.exists(os.path.dirname(folder))]))
    """
    done = in_throwaway(sys.executable, "-c", textwrap.dedent(program))
    told, own, mode, left, fresh, remains = json.loads(done.stdout or done.stderr)
    assert {asked: "PermissionError" in text for asked, text in told.items()} == dict.fromkeys(told, True), told
    assert (own, fresh, mode, remains) == ("['own']\n", "[]\n", 0o700, False)
    assert len(left) <= 2  # the last episodes' folders may still be on their way out


def test_what_descriptors_need_stays_allowed(bare: Sandbox) -> None:
    code = """
        import fcntl, os
        file = open('shared', 'w+')
        [fcntl.fcntl(file, *a) >= 0 for a in ((0, 5), (1,), (2, 1), (3,), (4, os.O_NONBLOCK), (1030, 5))]
    """
    assert bare.run(textwrap.dedent(code)) == ToolResult(text=f"{[True] * 6}\n")


def test_the_code_is_not_told_where_on_the_host_it_runs(bare: Sandbox) -> None:
    code = """
        import sys
        told = [sys.argv, sys.orig_argv, sys.executable, sys._base_executable]
        ours = [name for name in sys.modules if name.startswith(('configs', 'envs'))]
        told += [sys.modules[name].__dict__.get('__file__') for name in ours]
        frame = sys._getframe()
        while frame:
            told.append(frame.f_code.co_filename)
            frame = frame.f_back
        print(told)
    """
    told = bare.run(textwrap.dedent(code)).text
    assert str(_ROOT) not in told
    assert ".venv" not in told


def test_the_warden_gives_up_its_rights_before_the_code_runs(bare: Sandbox) -> None:
    """The warden reads bytes that the code wrote."""
    with bare.episode() as episode:
        episode.run("1")
        (zygote,) = psutil.Process(bare.pid).children()
        # Of an episode before, on a busy machine, the warden may still be ending.
        warden = max(zygote.children(), key=psutil.Process.create_time)
        lines = Path(f"/proc/{warden.pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")


# Clean-up


def test_files_of_an_episode_are_bounded_together_and_go_with_it(bare: Sandbox) -> None:
    with bare.episode() as episode:
        result = episode.run("for i in range(100): open(f'{i}', 'wb').write(bytes(4 << 20))", timeout_s=60)
        assert result.error == ("exception" if bare.state.tier == "namespaces" else "disk")
        assert "No space left" in result.text or "more than 16 MB or 256 files" in result.text
        many = episode.run("for i in range(1000): open(f'{i}', 'w').close()", timeout_s=60)
        assert many.error in ("exception", "disk")


def test_all_of_a_flat_folder_is_counted(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 16 << 20)
    assert not too_many_files(folder)
    (tmp_path / "b").write_bytes(b"x")
    assert too_many_files(folder)
    (tmp_path / "a").unlink()
    for number in range(255):
        (tmp_path / str(number)).touch()
    assert not too_many_files(folder)
    (tmp_path / "c").touch()
    assert too_many_files(folder)
    os.close(folder)


def test_a_removed_folder_is_gone_while_files_still_come(tmp_path: Path) -> None:
    scratch = make_scratch(str(tmp_path))
    folder = Path(make_folder(scratch))
    assert (Path(scratch).stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o700, 0o700)

    def write_last_files() -> None:
        for number in range(500):
            try:
                (folder / str(number % 50)).touch()
            except FileNotFoundError:
                return

    dying = threading.Thread(target=write_last_files)
    dying.start()
    remove_folder(scratch)
    dying.join()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("wanted", "killed"),
    [
        ("auto", ("host",)),
        *(("landlock", killed) for killed in (("host",), ("watcher", "host"), ("host", "watcher"), ("zygote", "host"))),
        ("landlock", ("host", "end of the zygote", "watcher")),
    ],
)
def test_nothing_is_left_when_the_host_is_killed(wanted: str, killed: tuple[str, ...]) -> None:
    """Ray also kills the children of a worker that it ends."""
    program = f"""
        from envs.sandbox import Sandbox, SandboxSettings
        sandbox = Sandbox(SandboxSettings(tier="{wanted}"))
        episode = sandbox.episode()
        print(sandbox.pid, sandbox.state.tier, flush=True)
        print(episode.run("open('note', 'w').close()\\nprint(__import__('os').getcwd())").text, flush=True)
        episode.run("while True: pass", timeout_s=60)
    """
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, cwd=_ROOT, text=True
    )
    assert host.stdout is not None
    pid, tier = host.stdout.readline().split()
    folder = Path(host.stdout.readline().strip())
    processes = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
    assert tier == "namespaces" or folder.is_dir()
    pids = {"host": host.pid, "watcher": int(pid), "zygote": processes[1].pid}
    for part in killed:
        if part in pids:
            os.kill(pids[part], signal.SIGKILL)
        else:
            psutil.wait_procs(processes[1:2])
    host.wait()
    host.stdout.close()
    deadline = time.monotonic() + 60
    while left := [one for one in processes if one.is_running()] or (tier == "landlock" and folder.parent.exists()):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


# Memory between steps


def test_idle_episodes_above_the_bound_are_ended_and_say_so(sandbox: Sandbox) -> None:
    num_episodes, bound_mb, each_mb = 6, 200, 60
    with Sandbox(SandboxSettings(tier=sandbox.state.tier, idle_memory_mb=bound_mb)) as bounded:
        fresh = bounded.episode()
        fresh.run("kept = 1")
        episodes = [bounded.episode() for _ in range(num_episodes)]
        for number, episode in enumerate(episodes):
            episode.run(f"import numpy as np\nx = np.full({each_mb << 17}, {number}.0)", timeout_s=60)
        texts = [episode.run("'x' in globals()", timeout_s=60).text for episode in episodes]
        assert fresh.run("kept").text == "1\n"
        for episode in (fresh, *episodes):
            episode.close()
    assert texts.count("True\n") == 3
    assert texts.count(f"{RESTARTED}False\n") == num_episodes - 3


def test_files_in_memory_count_as_memory(namespaces: None) -> None:
    settings = SandboxSettings(tier="namespaces", idle_memory_mb=9)
    write = "for i in range(3): open(f'{i}', 'wb').write(bytes(4 << 20))"
    with Sandbox(settings) as bounded, bounded.episode() as episode:
        assert episode.run(write).error is None
        assert episode.run("1").text == f"{RESTARTED}1\n"
