"""Retrieved documents in a question: where they stand, and what happens when they do not fit.

They follow the memories and the history, in the user's last message. In the system text, where LlamaIndex's
ContextChatEngine has them, they would stand before what is injected and change it with every question. Documents that
do not fit are asked about part by part, each part refining the answer to those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_memory.errors import PromptError
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.chat_engine.context import DEFAULT_CONTEXT_TEMPLATE, DEFAULT_REFINE_TEMPLATE
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore

Tokenize = Callable[[str], Sequence[Any]]
_AROUND_MESSAGE = 8
"""Tokens that chat templates write around a message, at most."""
_SPARE = 16
_OVERLAP = 0.1
_DEFAULT_OUTPUT = 256


@dataclass(frozen=True, slots=True)
class Templates:
    """How documents are put into a question. `first` has `{context_str}`; `refine` has `{context_msg}` and
    `{existing_answer}`. With `{query_str}` a template says itself where the question stands; otherwise it stands
    last."""

    first: PromptTemplate
    refine: PromptTemplate

    @classmethod
    def read(cls, first: str | PromptTemplate | None, refine: str | PromptTemplate | None) -> Templates:
        return cls(_template(first or DEFAULT_CONTEXT_TEMPLATE), _template(refine or DEFAULT_REFINE_TEMPLATE))

    def question(self, question: str, part: str | None, answer: str | None) -> ChatMessage:
        """The user's message: the question alone, with documents, or with documents and the answer so far."""
        if part is None:
            return ChatMessage(role=MessageRole.USER, content=question)
        template = self.first if answer is None else self.refine
        text = template.format(
            context_str=part, context_msg=part, existing_answer=answer or "", query_str=question
        )
        if "query_str" not in template.template_vars:
            text = f"{text.rstrip()}\n\n{question}"
        return ChatMessage(role=MessageRole.USER, content=text)


def parts(
    nodes: Sequence[NodeWithScore],
    messages: Sequence[ChatMessage],
    question: str,
    templates: Templates,
    metadata: LLMMetadata,
    tokenize: Tokenize,
) -> list[str | None]:
    """The texts of `nodes`, cut so that each fits into one question behind `messages`; one None without nodes.

    Raises:
        PromptError: there is no room for any of it.
    """
    texts = [node.node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes]
    whole = "\n\n".join(text for text in texts if text)
    if not whole:
        return [None]
    asked = [*messages, templates.question(question, "", None)]
    used = sum(len(tokenize(message.content or "")) + _AROUND_MESSAGE for message in asked)
    output = metadata.num_output if metadata.num_output > 0 else _DEFAULT_OUTPUT
    room = metadata.context_window - output - used - _SPARE
    if room < 1:
        raise PromptError(
            f"The conversation has about {used} tokens and leaves no room for documents in a context of "
            f"{metadata.context_window}: reset it, ask for a shorter answer, or start the engine with a larger "
            "max_model_len."
        )
    if len(tokenize(whole)) <= room:
        return [whole]
    refining = len(tokenize(templates.refine.get_template())) + output  # the answer so far takes room, too
    room = max(room - refining, room // 2, 1)
    splitter = TokenTextSplitter(
        chunk_size=room, chunk_overlap=int(room * _OVERLAP), tokenizer=lambda text: list(tokenize(text))
    )
    return [*splitter.split_text(whole)]


def _template(template: str | PromptTemplate) -> PromptTemplate:
    return PromptTemplate(template) if isinstance(template, str) else template
