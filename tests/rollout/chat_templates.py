"""The behaviour of well-known chat templates in as few words as can be, and a small tokenizer that renders them."""

CHATML = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The thinking of earlier replies is dropped; an empty one opens the next where thinking is off.
QWEN3 = """
{%- for m in messages %}
  {%- set said = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}
  {{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# Trims every message, and says what day it is in the system's.
LLAMA3 = """
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nCutoff: 2023.\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# The thinking of earlier replies is dropped; one that has just begun opens the next.
DEEPSEEK_R1 = """
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{ m.content }}
  {%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
  {%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

LLAMA2 = """
{%- if messages[0].role == 'system' %}{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
  {%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
  {%- else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

ALTERNATE = """
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
  {{- raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"""

# Both versions put the system's words into the last user turn, whichever that is.
MISTRAL_V03 = (
    """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
  {%- set messages = messages[1:] %}{% endif %}"""
    + ALTERNATE
    + """
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
  {%- elif loop.last and system is defined %}{{ '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
  {%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}"""
)

GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ALTERNATE
    + """
{%- for m in messages %}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}
  {{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
)

ROLES = {"chatml": CHATML, "qwen3": QWEN3, "llama2": LLAMA2, "llama3": LLAMA3}
"""Templates with a place for the system's words."""
NO_ROLE = {"mistral v0.3": MISTRAL_V03, "gemma2": GEMMA2}
"""Templates that refuse them, or move them from turn to turn."""


def blank_before_tokenizer_of(template):
    """One token per character, as Llama 2 and its like tokenise: every text begins with a blank, which joins its first
    letter, and what is no letter is bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("▁", chr(code)) for code in range(33, 127)]
    tokens += ["".join(pair) for pair in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def tokenizer_of(template):
    """One token per byte, `<s>` and `</s>` as its special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast
