"""A LangChain agent that knows its users again: two of them, in several sessions, on a laptop's CPU.

    python examples/langchain_agent.py

Each session is a thread of its own, so the agent's own history begins empty. What it knows of earlier sessions comes
from memory, and is injected into the model's KV cache instead of being read again.
"""

from __future__ import annotations

import tempfile
from typing import Any

from langchain.agents import create_agent
from langchain_inferscale import ChatInferScale, InferScaleMemoryMiddleware
from langgraph.checkpoint.memory import InMemorySaver

from inferscale_memory import Memory

SESSIONS = [
    ("maya", "monday", "My sister Ines gets married on 14 June in Porto."),
    ("maya", "monday", "I am allergic to walnuts."),
    ("omar", "tuesday", "I run a bicycle shop in Lyon."),
    ("maya", "friday", "What am I allergic to?"),
    ("omar", "friday", "In which city is my bicycle shop?"),
    ("maya", "sunday", "Where does my sister get married?"),
]


def main(config: dict[str, Any] | None = None) -> list[Any]:
    """Hold all sessions; the answers, in order."""
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory.from_config(
            {"engine": {"provider": "transformers"}, "folder": folder, **(config or {})}
        )
        agent = create_agent(
            ChatInferScale(memory=memory, max_tokens=24),
            middleware=[InferScaleMemoryMiddleware(memory, top_k=3, infer=False, answers=False)],
            checkpointer=InMemorySaver(),
        )
        for user, day, words in SESSIONS:
            who: Any = {"configurable": {"user_id": user, "thread_id": f"{user} on {day}"}}
            answer = agent.invoke({"messages": [{"role": "user", "content": words}]}, who)["messages"][-1]
            answers.append(answer)
            read = answer.usage_metadata
            print(f"{day}, {user}: {words}\n    {answer.text.strip()}")
            for fact in answer.response_metadata["memories"]:
                how = "injected" if fact["injected"] else "as text "
                print(f"    {how} {fact['score']:5.2f}  {fact['text'][:70]!r}")
            print(
                f"    {read['input_token_details']['cache_read']} of {read['input_tokens']} tokens were not read\n"
            )
            memory.flush()  # the turn is encoded in the background; in an app, time passes
        memory.close()
    return answers


if __name__ == "__main__":
    main()
