"""Tiny random models of every supported family: made in a second, loadable by transformers and by vLLM.

Weights are drawn wide enough that attention is far from uniform and logits differ clearly: with the usual
0.02 a test could inject any keys at all and pass. Never used outside tests.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB = 512
BOS, EOS, PAD = "<|bos|>", "<|im_end|>", "<|pad|>"
SPECIAL = [BOS, EOS, PAD, "<|im_start|>"]
CONTEXT = 4096

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The text is there only to give the tokenizer merges worth having.
CORPUS = """
Alice moved from Lisbon to Porto in March and now works as a nurse at the children's hospital.
Bob said that he would rather take the train to Berlin than fly, because he dislikes airports.
On 12 May 2024 she adopted a grey cat called Miso; the cat sleeps on the radiator all winter.
They planned to meet on Friday evening at the restaurant near the river, but it was raining.
What is the name of the cat that Alice adopted, and where does it sleep in the winter?
The user prefers tea over coffee, is allergic to peanuts, and runs ten kilometres every Sunday.
Yesterday my sister told me that her new job starts in September and that she is very happy.
How many people live in the house? Three: the two brothers and their grandmother, who is ninety.
He changed his mind: he will not study physics but music, and he will move to Vienna in autumn.
Remember that the meeting was moved from Tuesday to Thursday, at nine o'clock in the morning.
You are a helpful assistant. Use the memories below to answer the question of the user.
The answer is not in the memories. I do not know when the conference takes place this year.
"""

_ATTENTION = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **parameters}


# family -> (name of the configuration class, what differs from `_ATTENTION`)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 3, "rope_parameters": _rope()}),
    "llama3": (
        "LlamaConfig",
        {
            "num_hidden_layers": 3,
            "rope_parameters": _rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=512,
            ),
        },
    ),
    "mistral": ("MistralConfig", {"num_hidden_layers": 3, "sliding_window": 48, "rope_parameters": _rope()}),
    "qwen2": ("Qwen2Config", {"num_hidden_layers": 3, "rope_parameters": _rope(rope_theta=1_000_000.0)}),
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 3, "rope_parameters": _rope(rope_theta=1_000_000.0)}),
    "phi3": ("Phi3Config", {"num_hidden_layers": 3, "rope_parameters": _rope()}),
    "gemma2": (
        "Gemma2Config",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "rope_parameters": _rope(),
            "attn_logit_softcapping": 10.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
            "rope_parameters": {
                _SLIDING: _rope(),
                _FULL: _rope(rope_type="linear", factor=8.0, rope_theta=1_000_000.0),
            },
        },
    ),
}

FAMILIES = tuple(_FAMILIES)

# Families that put positions elsewhere than into rotated keys, or not into every layer.
_HEADS = {"num_key_value_heads": 4}
_FAMILIES |= {
    "opt": ("OPTConfig", {**_HEADS, "num_hidden_layers": 2, "ffn_dim": 192, "word_embed_proj_dim": 128}),
    "gpt2": ("GPT2Config", {**_HEADS, "num_hidden_layers": 2, "n_inner": 192}),
    "bloom": ("BloomConfig", {**_HEADS, "num_hidden_layers": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "rope",
            "rope_parameters": _rope(),
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 192,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", _FULL],
            "rope_parameters": _rope(),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
            "rope_parameters": _rope(),
        },
    ),
}


def tiny_model(family: str, folder: Path, dtype: str = "float32", **overrides: Any) -> Path:
    """Write a random model of `family`, with tokenizer and chat template, into `folder`; returns `folder`.

    The same family, dtype and overrides always give the same weights. `overrides` replace fields of the
    configuration.
    """
    import transformers

    name, fields = _FAMILIES[family]
    tokenizer = tiny_tokenizer()
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = getattr(transformers, name)(
        vocab_size=VOCAB, max_position_embeddings=CONTEXT, **{**_ATTENTION, **ids, **fields, **overrides}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, family)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _draw(model: torch.nn.Module, family: str) -> None:
    """Random weights: hidden states stay of order one, attention scores spread over several units."""
    generator = torch.Generator().manual_seed(20)
    gain_is_offset = family.startswith("gemma")  # Gemma's norms multiply by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name == "model.norm.weight":
                # Signs at random: otherwise tied embeddings make every model repeat its last token.
                parameter.copy_(noise - (1.0 if gain_is_offset else 0.0))
            elif "norm" in name:
                gain = 1.6 if "q_norm" in name or "k_norm" in name else 1.0
                parameter.copy_(0.2 * noise + gain - (1.0 if gain_is_offset else 0.0))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(0.1 * noise)


@cache
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of exactly `VOCAB` tokens, with a ChatML-like template. Adds no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.split("\n"), trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
