"""What the app gains: answers in which memories are injected instead of read again.

python examples/mem0_app/and_chat.py
"""

import sys

from inferscale_memory import Memory

folder = sys.argv[1] if len(sys.argv) > 1 else "/tmp/mem0-app-and-chat"
with Memory.from_config({"folder": folder}) as memory:  # all local; {"engine": {"model": ...}} names a model
    memory.add("I am allergic to walnuts.", user_id="maya", infer=False)
    memory.add("My sister's wedding is on 14 June in Porto.", user_id="maya", infer=False)
    memory.flush()

    reply = memory.chat("When is the wedding?", user_id="maya", max_tokens=40)
    print(reply.text)
    for recalled in reply.memories:
        print(f"{recalled.score:5.2f}  {'injected' if recalled.injected else 'as text'}  {recalled.text}")
    done, ttft_s = reply.completion, reply.timings.ttft_s
    print(
        f"{done.injected_tokens} tokens injected, {done.prefilled_tokens} prefilled, {ttft_s:.2f} s to the first"
    )
