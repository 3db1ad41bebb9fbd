"""Turns a GGUF file of a Llama model into the safetensors folder vLLM and transformers load.

Run once, as a program of its own (`python -m inferscale_memory.convert`): it holds the weights twice, and a
converter that is killed for memory must not take the caller with it. It must never write outside its target
folder, and never leave weights in it whose values differ from the dequantized GGUF.
"""

import sys
from pathlib import Path


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes config, float32 weights, tokenizer and chat template of `gguf` into the folder `target`.

    Loading a GGUF leaves a quantization config behind that makes every later load look for GGUF tensors,
    so the weights are copied into a fresh model made from a config without it. Raises `ValueError` when the
    file carries no chat template or its tensors do not fill the model.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    if not tokenizer.chat_template:
        raise ValueError(f"{name} carries no chat template")
    quantized = LlamaForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    settings = quantized.config.to_dict()
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(leftover, None)
    plain = LlamaForCausalLM(LlamaConfig(**{**settings, "dtype": "float32"}))
    plain.load_state_dict(quantized.state_dict(), strict=True)
    plain.generation_config = quantized.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> int:
    """`python -m inferscale_memory.convert FILE.gguf FOLDER`; the last line of stderr names what failed."""
    gguf, target = (Path(argument) for argument in sys.argv[1:3])
    try:
        convert_gguf(gguf, target)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
