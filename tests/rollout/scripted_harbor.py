"""A program that answers `harbor run` as Harbor does: it plays a task in one call, lets its verifier, here a file with
the right reply, judge it, and writes the trial's result. A task's `script` makes it misbehave."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser
from pathlib import Path


def main():
    parser = ArgumentParser()
    parser.add_argument("word", choices=["run"])
    for flag in ("--yes", "--quiet", "--no-delete"):
        parser.add_argument(flag, action="store_true", required=True)
    for name in ("--agent", "--model", "--path", "--jobs-dir", "--env"):
        parser.add_argument(name)
    given = parser.parse_args()
    task, trial = Path(given.path), Path(given.jobs_dir) / "job" / "trial"
    trial.mkdir(parents=True)
    script = (task / "script").read_text() if (task / "script").exists() else ""
    if script == "says nothing":
        sys.exit("No such task")
    result = {"verifier_result": None, "exception_info": None}
    if script in ("fails", "is slow"):
        result["exception_info"] = {"exception_type": "AgentTimeoutError", "exception_message": "after\n9 s"}
    if script == "hangs":
        hang(task)
    if script == "leaves a daemon":
        leave_daemon(task)
    reply = ask(given.model.removeprefix("openai/"), (task / "instruction.md").read_text())
    if script != "fails":
        right = reply == (task / "tests" / "expected").read_text()
        result["verifier_result"] = {"rewards": {"reward": float(right), "length": len(reply)}}
    (task / "seen").write_text(json.dumps({"environment": dict(os.environ), "agent": given.agent, "env": given.env}))
    (trial / "result.json").write_text(json.dumps(result))
    (trial.parent / "result.json").write_text("{}")


def hang(task):
    """With a daemon; a container is taken down when the trial is called off."""

    def take_down(number, frame):
        (task / "taken down").touch()
        sys.exit(1)

    signal.signal(signal.SIGTERM, take_down)
    leave_daemon(task)
    time.sleep(600)


def leave_daemon(task):
    (task / "daemon").write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))


def ask(model, text):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL'].rstrip('/')}/chat/completions",
        data=json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


main()
