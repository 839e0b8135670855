"""An Ollama Modelfile: the file to run, and a template that renders messages as the policy saw them in training."""

from typing import Any

from rollout.chat import ChatPieces


def go_template(pieces: ChatPieces) -> str:
    """The chat template in Go's language. It only appends: a turn that was rendered once stays as it was, so that the
    server's cache and the policy see the dialogue that training saw. No marker trims white space, which a template's
    fixed text may end in."""
    system = f'{{{{ if eq $m.Role "system" }}}}{pieces.before_system}{{{{ $m.Content }}}}'
    lone = f"{{{{ if eq $i 0 }}}}{pieces.before_lone_user}"
    second = f"{{{{ else if eq $i 1 }}}}{pieces.before_user}"
    later = f"{{{{ else }}}}{pieces.before_next}{{{{ end }}}}"
    user = f'{{{{ else if eq $m.Role "user" }}}}{lone}{second}{later}{{{{ $m.Content }}}}{pieces.generation}'
    assistant = "{{ else }}{{ $m.Content }}{{ end }}"
    return f"{{{{ range $i, $m := .Messages }}}}{system}{user}{assistant}{{{{ end }}}}"


def render_modelfile(gguf_name: str, template: str, parameters: dict[str, Any]) -> str:
    """Raises ValueError for a template that a Modelfile cannot hold."""
    if '"""' in template:
        raise ValueError('a chat template with """ in it cannot stand in a Modelfile')
    lines = [f"FROM ./{gguf_name}", f'TEMPLATE """{template}"""']
    for name, value in parameters.items():
        values = value if isinstance(value, list) else [value]
        lines += [f'PARAMETER {name} "{one}"' if isinstance(one, str) else f"PARAMETER {name} {one}" for one in values]
    return "\n".join(lines) + "\n"
