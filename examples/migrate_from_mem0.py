"""Bring an existing mem0 store along: dry run, copy, and the same facts found again.

    EMBEDDER=$(inferscale fetch --embedder) python examples/migrate_from_mem0.py

The store of the old app is made here, with mem0 itself; with one of your own leave that part out.
"""

import json
import os
import sys
from pathlib import Path

import mem0

from inferscale_memory import Memory, cli

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/mem0-migration")
folder.mkdir(parents=True, exist_ok=True)
embedder = {
    "provider": "huggingface",
    "config": {"model": os.environ.get("EMBEDDER", "all-MiniLM-L6-v2"), "embedding_dims": 384},
}
old = {
    "embedder": embedder,
    "vector_store": {
        "provider": "qdrant",
        "config": {"path": str(folder / "qdrant"), "on_disk": True, "embedding_model_dims": 384},
    },
    "llm": {"provider": "openai", "config": {"api_key": "none"}},
    "history_db_path": str(folder / "history.db"),
}
new = {"embedder": embedder, "folder": str(folder / "inferscale")}

app = mem0.Memory.from_config(old)
for user, text in [("maya", "I am allergic to walnuts."), ("omar", "I never eat fish.")]:
    app.add(text, user_id=user, infer=False)
app.close()
app.vector_store.client.close()  # mem0 leaves its embedded Qdrant locked

(folder / "mem0.json").write_text(json.dumps(old), encoding="utf-8")
(folder / "ours.json").write_text(json.dumps(new), encoding="utf-8")
between = ["--from", str(folder / "mem0.json"), "--to", str(folder / "ours.json")]
for arguments in (["migrate", *between, "--dry-run"], ["migrate", *between]):
    print(f"$ inferscale {' '.join(arguments[:1] + arguments[5:])}", flush=True)
    if cli.main(arguments) != 0:
        sys.exit("the migration has failed")

with Memory.from_config(new) as memory:
    for user in ("maya", "omar"):
        found = memory.search("What food is bad for me?", filters={"user_id": user}, top_k=1)["results"]
        print(f"{user}: {found[0]['memory']}")
