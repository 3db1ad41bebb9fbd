"""`inferscale chat`: what is said is remembered, every answer can say why, and forgetting is real."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from inferscale_memory.commands.terminal.command import _config, _parser
from inferscale_memory.commands.terminal.talk import Talk
from inferscale_memory.errors import EngineError
from inferscale_memory.memory import Memory
from tests.memory.watched import WatchedEngine


class Screen:
    """A talk, and what it printed since it was last looked at."""

    def __init__(self, memory: Memory, *, extract: bool = False) -> None:
        self._out = io.StringIO()
        console = Console(file=self._out, width=200, highlight=False)
        self.talk = Talk(memory, console, user="ada", extract=extract, max_tokens=4)

    def says(self, line: str) -> str:
        assert self.talk.hear(line)
        text = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return text


@pytest.fixture
def screen(memory: Memory) -> Screen:
    return Screen(memory)


def test_statements_are_remembered_and_questions_are_not(screen: Screen, memory: Memory) -> None:
    assert "Remembered: My cat is called Miso" in screen.says("My cat is called Miso")
    assert "Remembered" not in screen.says("What is my cat called?")
    facts = memory.get_all(filters={"user_id": "ada"})["results"]
    assert [fact["memory"] for fact in facts] == ["My cat is called Miso"]


def test_why_shows_what_was_injected_its_scores_and_the_time(screen: Screen, memory: Memory) -> None:
    assert "Nothing was answered yet" in screen.says("/why")
    screen.says("My cat is called Miso [red]")
    memory.flush()
    screen.says("/new")
    screen.says("What is my cat called?")
    why = screen.says("/why")
    [row] = [line for line in why.splitlines() if "Miso [red]" in line]
    assert row.rstrip().endswith("injected")
    assert " injected, " in why
    assert "First token after" in why
    assert "0 injected" not in why


def test_memories_are_listed_and_searched(screen: Screen) -> None:
    assert "Nothing is remembered" in screen.says("/memories")
    for fact in ("My cat is called Miso", "I moved to Porto"):
        screen.says(fact)
    assert "Miso" in screen.says("/memories")
    found = screen.says("/memories cat called Miso").splitlines()
    assert "score" in found[0]
    assert "Miso" in found[1]


def test_forgetting_is_audited(screen: Screen, memory: Memory) -> None:
    screen.says("My cat is called Miso")
    assert "Name a number" in screen.says("/forget 1")
    screen.says("/memories")
    assert "Name a number" in screen.says("/forget 7")
    assert "Forgotten, and nowhere left" in screen.says("/forget 1")
    assert memory.audit("My cat is called Miso").clean
    assert memory.get_all(filters={"user_id": "ada"})["results"] == []
    screen.says("I moved to Porto")
    assert "forgotten" in screen.says("/forget all")
    assert "Nothing is remembered" in screen.says("/memories")


def test_one_user_does_not_see_another(screen: Screen) -> None:
    screen.says("My cat is called Miso")
    assert "ben, 0 memories" in screen.says("/user ben")
    assert "Nothing is remembered" in screen.says("/memories")
    screen.says("What is my cat called?")
    assert "Miso" not in screen.says("/why")
    assert "ada, 1 memory" in screen.says("/user ada")


def test_extraction_that_fails_is_said_and_the_talk_goes_on(memory: Memory, engine: WatchedEngine) -> None:
    """A random model draws nothing out of anything."""
    screen = Screen(memory, extract=True)
    said = screen.says("My cat is called Miso")
    assert "Remembered" not in said or "Miso" in said
    assert "/memories" in screen.says("/help")
    assert "There is no /sing" in screen.says("/sing")
    assert screen.says("   ") == ""
    assert not screen.talk.hear("/quit")


def test_what_does_not_fit_is_said(screen: Screen) -> None:
    assert "send fewer or shorter messages" in screen.says("word " * 6000 + "?")


@pytest.mark.parametrize("installed", ["vllm", "transformers"])
def test_an_engine_gets_the_options_that_it_takes(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr("inferscale_memory.commands.terminal.command.installed_engine", lambda: installed)
    monkeypatch.setenv("INFERSCALE_API_KEY", "the key")

    def engine(*arguments: str) -> dict[str, object]:
        return dict(_config(_parser().parse_args(arguments))["engine"])

    for_vllm = {"provider": "vllm", "model": "folder", "max_model_len": 4096, "enforce_eager": True}
    alone = {"provider": "transformers", "model": "folder"}
    assert engine("--model", "folder") == (for_vllm if installed == "vllm" else alone)
    assert engine("--model", "folder", "--engine", "vllm") == for_vllm
    assert engine("--model", "folder", "--engine", "transformers") == alone
    there = engine(
        "--engine", "remote", "--base-url", "http://there", "--model", "name", "--tokenizer", "folder"
    )
    assert there == {
        "provider": "remote",
        "base_url": "http://there",
        "model": "name",
        "tokenizer": "folder",
        "api_key": "the key",
    }


@pytest.mark.engine
def test_the_command_talks_through_a_pipe_and_remembers_the_next_time(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inferscale_memory.cli", "chat", "--engine", "transformers"]
    command += ["--model", str(model), "--folder", str(tmp_path), "--max-tokens", "2", "--user", "ada"]
    environment = {**os.environ, "INFERSCALE_HOME": str(tmp_path)}

    def talk(*lines: str) -> str:
        done = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, env=environment, check=True
        )
        return done.stdout

    assert "ada, 0 memories" in talk("My cat is called Miso", "/quit", "never heard")
    again = talk("/memories", "What is my cat called?", "/why")
    assert "ada, 1 memory." in again
    assert again.count("My cat is called Miso") == 2
    assert "never heard" not in again


def test_what_is_no_number_and_an_engine_that_fails_end_no_talk(
    screen: Screen, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen.says("My cat is called Miso")
    screen.says("/memories")
    assert "Name a number" in screen.says("/forget \u00b2")

    def failing(*_: object, **__: object) -> None:
        raise EngineError("the engine has ended: start it again")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "stream", failing)
        assert "start it again" in screen.says("I like tea")
    assert "Remembered: I like tea" in screen.says("I like tea")


def test_a_name_that_no_user_can_have_is_said_and_the_talk_goes_on(screen: Screen) -> None:
    screen.says("My cat is called Miso")
    assert "whitespace" in screen.says("/user two words")
    assert "Miso" in screen.says("/memories")


def test_a_user_on_the_command_line_that_cannot_be_is_named(
    tmp_path: Path, model: Path, hashing_embedder: object, capsys: pytest.CaptureFixture[str]
) -> None:
    from inferscale_memory.cli import main

    options = ["--user", "two words", "--model", str(model), "--engine", "transformers"]
    assert main(["chat", *options, "--folder", str(tmp_path)]) == 2
    assert "--user 'two words'" in capsys.readouterr().err
