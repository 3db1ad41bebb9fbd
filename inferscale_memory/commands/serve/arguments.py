"""Which of vLLM's arguments were given to `inferscale serve`, in whatever spelling vLLM takes.

vLLM takes dashes and underscores, `--name=value`, dotted parts of JSON, unambiguous beginnings of a name, short names,
and files of arguments (`--config`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from inferscale_memory.connector import configuration
from inferscale_memory.errors import ConfigurationError

SHORT = {
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-pcp": "--prefill-context-parallel-size",
}
ABBREVIATED = ("--host", "--port")
"""Arguments of the command itself: vLLM would take a beginning of one for its own, behind the command's back."""


def with_files(arguments: Sequence[str]) -> list[str]:
    """The arguments, preceded by those of a configuration file that is named among them.

    Raises:
        ConfigurationError: there is no such file, or it does not hold arguments by name.
    """
    for at, argument in enumerate(arguments):
        if argument == "--config":
            if at + 1 == len(arguments):
                raise ConfigurationError("--config needs the path of a YAML file")
            return [*_read(Path(arguments[at + 1])), *arguments]
    return list(arguments)


def named(arguments: Sequence[str], *names: str) -> bool:
    """Whether one of `names` is among them."""
    return any(_means(name, given) for given, _ in _options(arguments) for name in names)


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """What `name` is set to; None where it is not set. Where it is set twice vLLM takes the last."""
    values = [value for given, value in _options(arguments) if _means(name, given)]
    return values[-1] if values else None


def refuse(arguments: Sequence[str]) -> None:
    """Raises ConfigurationError for arguments under which the server would not do what it is for."""
    for given, value in _options(arguments):
        for name in ABBREVIATED:
            if given != name and _means(name, given):
                raise ConfigurationError(f"write {name} in full instead of {given}")
        for option in configuration.REFUSED:
            name = f"--{option.replace('_', '-')}"
            problem = configuration.refused_option(option, value) if _means(name, given) else None
            if problem is not None:
                raise ConfigurationError(f"{name} does not go with `inferscale serve`: {problem}")


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name with dashes, in full where it was short; value)."""
    for at, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, separator, value = argument.partition("=")
        following = arguments[at + 1] if at + 1 < len(arguments) else "-"
        name = name.partition(".")[0]
        name = SHORT.get(name, name.replace("_", "-"))
        if separator:
            yield name, value
        else:
            yield name, None if following.startswith("-") else following


def _means(name: str, given: str) -> bool:
    """Whether vLLM may take `given` for `name`."""
    return given == name or (len(given) > len("--") and given.startswith("--") and name.startswith(given))


def _read(path: Path) -> list[str]:
    import yaml  # type: ignore[import-untyped]  # vLLM brings it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config {path} does not hold arguments by name")
    arguments = []
    for name, value in content.items():
        if value is False:
            arguments.append(f"--no-{name}")
        elif value is not None:
            arguments.append(f"--{name}" if value is True else f"--{name}={value}")
    return arguments
