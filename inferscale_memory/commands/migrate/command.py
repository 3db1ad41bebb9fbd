"""The command `inferscale migrate`: reads two configurations, copies, counts, and says what it found.

What it prints on stdout is the result; progress goes to stderr. It must never report success for a part.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from inferscale_memory.commands.migrate.copy import Counts, copy
from inferscale_memory.commands.migrate.reembed import Reembedded
from inferscale_memory.commands.migrate.source import Source
from inferscale_memory.errors import ConfigurationError, InferScaleError, MigrationError, first_line
from inferscale_memory.facts.scope import Scope
from inferscale_memory.memory import Memory
from inferscale_memory.memory.config import Settings
from inferscale_memory.progress import bar

T = TypeVar("T")
BATCH = 256
_NOT_NEEDED = ("llm", "reranker")
"""Parts of a configuration that may want a key, and have nothing to do here."""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 when everything is there, 1 when something is not."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.reembed is not None:
        if options.source is not None or options.target is not None:
            parser.error("--reembed takes neither --from nor --to")
        return _reembed(options.reembed, options.batch, dry=options.dry_run)
    if options.source is None or options.target is None:
        parser.error("pass --from and --to, or --reembed")
    there, here = _read(options.source), _read(options.target)
    with closing(_opened(options.source, lambda: Source(there))) as source:
        if options.dry_run:
            return _counted(source)
        _opened(options.target, lambda: _refuse_the_same(source, here))
        with _open(options.target, here) as memory, bar("Migrating", sum(1 for _ in source.facts())) as step:
            try:
                counts = copy(source, memory, batch=options.batch, step=step)
            except InferScaleError:
                raise
            except Exception as error:  # whatever stores and embedders raise
                raise MigrationError(
                    f"copying failed ({type(error).__name__}: {error}): mend that and run the same command again; "
                    "it goes on where it was"
                ) from error
    return _told(counts)


def _reembed(path: Path, batch: int, *, dry: bool) -> int:
    work = _opened(path, lambda: Reembedded(_needed(_read(path))))
    total = work.count()
    if dry:
        print(f"{total} vectors of facts and entities. Nothing was written.")
        return _unless_empty(total)
    with bar("Embedding", total) as step:
        try:
            done, model = work.run(batch=batch, step=step)
        except InferScaleError:
            raise
        except Exception as error:  # whatever embedders raise
            raise MigrationError(
                f"embedding failed ({type(error).__name__}: {error}): mend that and run the same command again; it "
                "goes on where it was"
            ) from error
    print(
        f"{done} of {total} vectors of facts and entities were made by {model}; it had made the others before."
    )
    return _unless_empty(total)


def _counted(source: Source) -> int:
    owners = Counter(
        Scope.of(payload).owner or "(nobody)" for _, payload in source.facts() if payload.get("data")
    )
    entities = sum(1 for _ in source.entities())
    events = sum(len(events) for events in source.history().values())
    print(
        f"{owners.total()} facts of {len(owners)} owners, {entities} entities, {events} events. Nothing was written."
    )
    return _unless_empty(owners.total())


def _told(counts: Counts) -> int:
    print(
        f"{counts.facts} facts: {counts.copied} copied, {counts.updated} updated, {counts.present} were there, "
        f"{counts.newer} were there in a later version. {counts.entities} entities and {counts.events} events of "
        f"histories were copied."
    )
    if counts.wordless:
        print(
            f"inferscale: {counts.wordless} rows of the source have no text, and were left out",
            file=sys.stderr,
        )
    if counts.forgotten:
        print(
            f"inferscale: {counts.forgotten} facts were deleted from the target, and stay so: take another folder",
            file=sys.stderr,
        )
    if counts.missing:
        print(
            f"inferscale: {len(counts.missing)} of {counts.facts} facts are not in the target after all, such as "
            f"{counts.missing[0]}: run it again, and look for errors of its vector store",
            file=sys.stderr,
        )
        return 1
    return _unless_empty(counts.facts)


def _unless_empty(facts: int) -> int:
    if not facts:
        print(
            "inferscale: the source holds no facts: is it the right path, and the right collection_name?",
            file=sys.stderr,
        )
    return 0 if facts else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "inferscale migrate",
        description="Copy the facts of a mem0 memory into another, or embed those of one anew. It may be interrupted "
        "and run again, any number of times. Close the memories first.",
    )
    for name, dest, text in (
        ("--from", "source", "mem0's configuration of the memory that is read, as JSON"),
        ("--to", "target", "configuration of the memory that is written; ours or mem0's"),
    ):
        parser.add_argument(name, dest=dest, metavar="CONFIG.json", type=Path, help=text)
    parser.add_argument(
        "--reembed",
        metavar="CONFIG.json",
        type=Path,
        help="make all vectors of this memory anew, by the embedder that its configuration names",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="count what would be copied, and write nothing"
    )
    parser.add_argument(
        "--batch", type=_positive, default=BATCH, help="facts at a time (default: %(default)s)"
    )
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("pass 1 or more")
    return number


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}): pass a file") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON ({error}): correct it") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is no JSON object: pass a configuration as from_config takes it")
    return config


def _refuse_the_same(source: Source, target: Mapping[str, Any]) -> None:
    one, other = source.config.vector_store, Settings.read(_needed(target)).mem0.vector_store
    if (one.provider, one.config) == (other.provider, other.config):
        raise ConfigurationError("source and target are the same store: pass another target")


def _needed(target: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in target.items() if name not in _NOT_NEEDED}


def _opened(path: Path, open_it: Callable[[], T]) -> T:
    """What `open_it` makes of the configuration in `path`. Whatever mem0, pydantic and stores raise is its fault."""
    try:
        return open_it()
    except InferScaleError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{path} cannot be opened ({type(error).__name__}: {first_line(error)}): correct it, or look whether its "
            "store is there"
        ) from error


@contextmanager
def _open(path: Path, target: Mapping[str, Any]) -> Iterator[Memory]:
    """The memory that is written. Its engine stays off: facts are encoded when they are first recalled."""
    with _opened(path, lambda: Memory.from_config(_needed(target))) as memory:
        if memory._settings is not None:
            memory._settings.engine.eager = False
        yield memory
