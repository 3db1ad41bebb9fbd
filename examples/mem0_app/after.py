"""A small app on mem0: it remembers what its users say, and finds it again.

Run it with EMBEDDER=$(inferscale fetch --embedder), or where all-MiniLM-L6-v2 can be downloaded.
"""

import os
import sys

from inferscale_memory import Memory

folder = sys.argv[1] if len(sys.argv) > 1 else "/tmp/mem0-app"
memory = Memory.from_config(
    {
        "embedder": {
            "provider": "huggingface",
            "config": {"model": os.environ.get("EMBEDDER", "all-MiniLM-L6-v2"), "embedding_dims": 384},
        },
        "vector_store": {
            "provider": "qdrant",
            "config": {"path": f"{folder}/qdrant", "on_disk": True, "embedding_model_dims": 384},
        },
        "llm": {"provider": "openai", "config": {"api_key": os.environ.get("OPENAI_API_KEY", "none")}},
        "history_db_path": f"{folder}/history.db",
    }
)

for user, text in [
    ("maya", "I am allergic to walnuts."),
    ("maya", "My sister's wedding is on 14 June in Porto."),
    ("omar", "I never eat fish."),
]:
    memory.add(text, user_id=user, infer=False)

for user, question in [("maya", "What food is bad for me?"), ("omar", "What food is bad for me?")]:
    found = memory.search(question, filters={"user_id": user}, top_k=1)
    print(f"{user}: {found['results'][0]['memory']}")

wedding = memory.search("When is the wedding?", filters={"user_id": "maya"}, top_k=1)["results"][0]
memory.update(wedding["id"], "My sister's wedding is on 21 June in Porto.")
print("maya:", memory.get(wedding["id"])["memory"])

memory.delete_all(user_id="omar")
print("omar:", len(memory.get_all(filters={"user_id": "omar"})["results"]), "memories")
memory.close()
