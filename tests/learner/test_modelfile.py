import re

import pytest
from tiny_export import save_tiny_export_model

from ray_jobs.gguf import go_template
from rollout.agent.agent import build_chat

SYSTEM, TASK, REPLY, RESULT = "Solve.", "Task: 6*7?\nStep 1 of 2.", '{"thought":"t"}', "Result: 42\nStep 2 of 2."


def rendered(template, messages):
    """Render the part of Go's template language that the templates use: range, if, else if, eq and a field."""
    body = template.removeprefix("{{ range $i, $m := .Messages }}").removesuffix("{{ end }}")
    parts = re.split(r"(\{\{ .*? \}\})", body)
    return "".join(one_message(parts, index, message) for index, message in enumerate(messages))


def one_message(parts, index, message):
    written, taken = [], [[True, True]]
    for part in parts:
        if found := re.fullmatch(r"\{\{ (else )?if eq \$(m\.Role|i) (\S+) \}\}", part):
            otherwise, what, value = found.groups()
            holds = message["role"] == value.strip('"') if what == "m.Role" else index == int(value)
            if not otherwise:
                taken.append([holds, holds])
            else:
                taken[-1] = [holds and not taken[-1][1], taken[-1][1] or holds]
        elif part == "{{ else }}":
            taken[-1] = [not taken[-1][1], True]
        elif part == "{{ end }}":
            taken.pop()
        elif all(on for on, _ in taken):
            written.append(message["content"] if part == "{{ $m.Content }}" else part)
    assert len(taken) == 1
    return "".join(written)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return build_chat(save_tiny_export_model(tmp_path_factory.mktemp("chat") / "m", "qwen3"))


def dialogue(*contents):
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_ollama_renders_the_dialogue_of_training(chat):
    template = go_template(chat.pieces)
    tokenizer = chat._tokenizer
    first = chat.prompt(SYSTEM, TASK)
    second = first + chat.encode_completion(REPLY) + chat.bridge(chat.encode_completion(REPLY), RESULT)
    assert rendered(template, dialogue(SYSTEM, TASK)) == tokenizer.decode(first)
    assert rendered(template, dialogue(SYSTEM, TASK, REPLY, RESULT)) == tokenizer.decode(second)
    # Thinking is off: each reply starts with Qwen3's empty thinking block.
    assert tokenizer.decode(second).count("<think>\n\n</think>\n\n") == 2
