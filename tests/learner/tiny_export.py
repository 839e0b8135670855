"""A tiny random model with a byte-level tokenizer and a chat template, as a folder that can be exported."""

import json

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_tiny_export_model(folder, architecture, **changes):
    """Two layers of random weights in bf16; 320 rows of embeddings for fewer tokens."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "qwen3":
        values["head_dim"] = 128
    config = AutoConfig.for_model(architecture, **(values | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = (0.2 * torch.randn(parameter.shape)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["How heavy is a crate of wool locks? 37 kg of 35 crates."] * 9, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == architecture
    return folder


def random_adapter(folder, *, rank=4, scale=0.1, seed=1):
    """Bytes of a LoRA adapter on every linear layer, as a checkpoint holds it."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    torch.manual_seed(seed)
    model = with_adapter(load_model(folder), rank)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = scale * torch.randn(parameter.shape)
    return save({name: value.contiguous() for name, value in get_peft_model_state_dict(model).items()})


def with_adapter(model, rank=4, adapter=None):
    """PEFT's own model, with these adapter bytes beside the weights or an untrained adapter."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    if adapter:
        set_peft_model_state_dict(model, load(adapter))
    return model.eval()


def load_model(path):
    """Load a model folder or a GGUF file in float32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    folder, options = path, {}
    if path.suffix == ".gguf":
        folder, options = path.parent, {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()


def greedy_answer(model, prompt, max_new_tokens):
    """Return the token ids that the model writes greedily, with its end token."""
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        # A single answer is never padded. The model may have several end tokens, but the pad must be one.
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
    return tuple(output[0, len(prompt) :].tolist())
