import re

import pytest
from jinja2 import Template
from tiny_export import save_tiny_export_model

from ray_jobs.gguf import go_template
from rollout.agent.agent import build_chat

SYSTEM, TASK, REPLY, RESULT = "Solve.", "Task: 6*7?\nStep 1 of 2.", '{"thought":"t"}', "Result: 42\nStep 2 of 2."


def rendered(template, messages):
    """Render the part of Go's template language that the template uses, translated to Jinja's."""
    body = template.removeprefix("{{ range $i, $m := .Messages }}").removesuffix("{{ end }}")
    for name, other in (("$m.Role", "role"), ("$m.Content", "content"), ("$i", "index")):
        body = body.replace(name, other)
    body = re.sub(r"\{\{ if eq (\S+) (\S+) \}\}", r"{% if \1 == \2 %}", body)
    body = re.sub(r"\{\{ else if eq (\S+) (\S+) \}\}", r"{% elif \1 == \2 %}", body)
    body = body.replace("{{ else }}", "{% else %}").replace("{{ end }}", "{% endif %}")
    jinja = Template(body, keep_trailing_newline=True)
    return "".join(jinja.render(index=index, **message) for index, message in enumerate(messages))


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
