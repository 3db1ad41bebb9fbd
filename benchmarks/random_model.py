"""An engine with random weights of a known model's shape, made where they are used: timing needs no download.

It works with torch, transformers and numpy alone. What it says is noise; what it takes is what the model takes on the
transformers engine, which answers one request at a time. Random weights must never be taken for a model: their
fingerprint is theirs alone.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from inferscale_memory.engine.hf.model import DTYPES
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt.segments import Prompt

_BLOCK = 16
"""vLLM's block size on a GPU: a hit ends at a whole block."""
_TOKENS = 1024
_BEGINS, _ENDS = "<|begin|>", "<|end|>"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|begin|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)

# name -> (configuration class, its fields as published with the instruct model)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mistral-7b": (  # v0.3
        "MistralConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32768,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "qwen2.5-7b": (
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "qwen3-14b": (
        "Qwen3Config",
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "tiny": (
        "LlamaConfig",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 2048,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


def shape_config(shape: str, dtype: str = "bfloat16") -> Any:
    """The configuration of that name. Raises ConfigurationError when there is none, or no such dtype."""
    if shape not in SHAPES:
        raise ConfigurationError(f"no shape is called {shape!r}: {', '.join(SHAPES)} are")
    name, fields = SHAPES[shape]
    architecture = name.replace("Config", "ForCausalLM")
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is unknown: pass one of {', '.join(DTYPES)}")
    config = getattr(transformers, name)(**fields, **ids, architectures=[architecture])
    config.dtype = DTYPES[dtype]
    return config


def weight_bytes(shape: str, dtype: str) -> int:
    """Bytes of the weights of a shape; none are made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape, dtype), dtype=DTYPES[dtype])
    return sum(weight.numel() * weight.itemsize for weight in model.parameters())


def made_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level BPE tokenizer of about `_TOKENS` tokens learned from `texts`, with a chat template; the same texts
    give the same one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TOKENS,
        special_tokens=[_BEGINS, _ENDS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGINS,
        eos_token=_ENDS,
        pad_token=_ENDS,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


class RandomEngine(TransformersEngine):
    """A `TransformersEngine` without a model's folder.

    Unlike that one it remembers what a prompt has computed, as a prefix cache would, for the next prompt of the same
    owner and salt, up to `prefix_bytes`: so the text path has what it has elsewhere, and a hit can be measured.

    Args:
        shape: one of `SHAPES`.
        texts: what the tokenizer is learned from.
        dtype: of weights and blobs.
        device, blob_bytes: as there.

    Raises:
        ConfigurationError: no such shape, dtype or device.
    """

    def __init__(
        self,
        shape: str,
        texts: Iterable[str],
        *,
        dtype: str = "bfloat16",
        device: str | None = None,
        blob_bytes: int = 1 << 30,
        prefix_bytes: int = 1 << 30,
    ) -> None:
        self.shape = shape
        self._place = tempfile.TemporaryDirectory(prefix="inferscale-random-")
        try:
            folder = Path(self._place.name)
            shape_config(shape, dtype).save_pretrained(folder)
            made_tokenizer(texts).save_pretrained(folder)
            super().__init__(folder, dtype=dtype, device=device, blob_bytes=blob_bytes)
        except BaseException:
            self._place.cleanup()
            raise
        assert self._shape is not None, "every shape is supported"
        self._room = prefix_bytes // self._shape.row_bytes
        self._computed: OrderedDict[tuple[str, str], tuple[list[int], DynamicCache]] = OrderedDict()

    @cached_property
    def fingerprint(self) -> str:
        said = f"random {self.shape} {self._dtype} {self._config.to_json_string()}"
        return blake2b(said.encode(), digest_size=16).hexdigest()

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self._config

    @property
    def device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        with self._lock:
            self._computed.clear()
        super().close()
        self._place.cleanup()

    def _made_model(self) -> Any:
        torch.manual_seed(0)
        with self._device:  # 8 billion weights are drawn where they stay
            return AutoModelForCausalLM.from_config(self._config, dtype=DTYPES[self._dtype])

    # -- what stands for a prefix cache ----------------------------------------------------------------------

    def _begun(self, loaded: Any, prompt: Prompt, ids: Sequence[int]) -> Any:
        injection = super()._begun(loaded, prompt, ids)
        if injection.tokens:
            return injection  # its keys are not those of the prompt alone: nobody may hit them
        name = (prompt.owner, prompt.salt)
        with self._lock:
            before = self._computed.pop(name, None)
        if before is not None:
            cache, cached = self._hit(*before, ids)
            injection = replace(injection, cache=cache, cached=cached)
        with self._lock:
            self._computed[name] = (list(ids), injection.cache)
            held = sum(len(known) for known, _ in self._computed.values())
            while held > self._room and len(self._computed) > 1:
                held -= len(self._computed.popitem(last=False)[1][0])
        return injection

    def _hit(self, known: Sequence[int], cache: DynamicCache, ids: Sequence[int]) -> tuple[DynamicCache, int]:
        """A cache of the whole blocks that `ids` begin with and `cache`, of the prompt `known`, holds; their tokens."""
        most = min(len(known), len(ids) - 1, cache.get_seq_length())
        shared = next((at for at in range(most) if known[at] != ids[at]), most) // _BLOCK * _BLOCK
        fresh = DynamicCache(config=self._config)
        if shared:
            with torch.inference_mode():
                for number, layer in enumerate(cache.layers):
                    fresh.update(layer.keys[:, :, :shared], layer.values[:, :, :shared], number)
        return fresh, shared
