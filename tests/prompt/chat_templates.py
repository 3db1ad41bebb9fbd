"""Real tokenizers, trained in a moment, and the chat templates of well-known models, shortened."""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
CONTROL = [BOS, EOS, "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[INST]", "[/INST]"]
CONTROL_IDS = set(range(len(CONTROL)))

CORPUS = """
Alice moved from Lisbon to Porto in March and now works as a nurse at the children's hospital.
On 12 May 2024 she adopted a grey cat called Miso; the cat sleeps on the radiator all winter.
You are a helpful assistant. You remember the following from earlier conversations:
What is the name of the cat that Alice adopted, and where does it sleep in the winter?
- [2026-01-05] Maya: I am allergic to peanuts. user system assistant User: Assistant: tools
""".strip().splitlines()


def build_tokenizer(
    chat_template: Any = None,
    *,
    adds_bos: bool = False,
    added: list[AddedToken] | None = None,
    normalizer: Any = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the control tokens above, and `added` ones."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        bos = (BOS, backend.token_to_id(BOS))
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    if added:
        backend.add_tokens(added)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = chat_template
    return tokenizer


# SmolLM2, Qwen2: a default system text when none is given.
CHATML_WITH_DEFAULT = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are Smol.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Qwen2.5: tools behind the system text, in the system turn.
QWEN_TOOLS_AFTER_SYSTEM = (
    "{% if tools %}"
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You are Qwen.{% endif %}{{ '\n\n# Tools\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% else %}<|im_start|>system\nYou are Qwen.<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}{% if not (loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Llama 3.1 and 3.2: BOS, today's date and tools before the system text; trims.
LLAMA3_TOOLS_BEFORE_SYSTEM = (
    "{{ bos_token }}<|im_start|>system\n"
    "Today Date: {{ strftime_now('%d %b %Y') }}\n"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% for message in messages %}{% if not (loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Llama 2: BOS before every question, the system text within the first one, strict alternation.
LLAMA2_SYSTEM_IN_FIRST_QUESTION = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set content = (system if loop.first else '') + message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)

# Mistral 7B v0.3: the system text within the last question, behind the history.
MISTRAL_SYSTEM_IN_LAST_QUESTION = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0].content + '\n\n' %}{% else %}{% set rest = messages %}{% set system = '' %}"
    "{% endif %}{{ bos_token }}"
    "{% for message in rest %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "[INST] {{ system if loop.last else '' }}{{ message.content }}[/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)

# Gemma 2: refuses a system role, trims, strict alternation.
GEMMA2_NO_SYSTEM = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)

# Gemma 3: merges the system text into the first question.
GEMMA3_MERGES_SYSTEM = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (first if loop.first else '') }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)

# Some fine-tunes: a system message is silently left out.
DROPS_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if message.role in ('user', 'assistant') %}"
    "[INST]{{ message.role }}: {{ message.content }}[/INST]{% endif %}{% endfor %}"
)

# Broken: the system text stands at the beginning and again before the answer.
SYSTEM_TWICE = CHATML_WITH_DEFAULT + "{{ messages[0]['content'] }}"

ALL = {
    "chatml": CHATML_WITH_DEFAULT,
    "qwen": QWEN_TOOLS_AFTER_SYSTEM,
    "llama3": LLAMA3_TOOLS_BEFORE_SYSTEM,
    "llama2": LLAMA2_SYSTEM_IN_FIRST_QUESTION,
    "mistral": MISTRAL_SYSTEM_IN_LAST_QUESTION,
    "gemma2": GEMMA2_NO_SYSTEM,
    "gemma3": GEMMA3_MERGES_SYSTEM,
    "drops": DROPS_SYSTEM,
    "base": None,
}
