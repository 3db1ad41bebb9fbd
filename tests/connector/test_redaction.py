"""What requests carry does not get into logs: not their words, not their owners, not their tokens."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import httpx
import pytest
from vllm import SamplingParams

from inferscale_memory.connector import protocol, secret
from inferscale_memory.connector.protocol import Inject
from inferscale_memory.connector.redaction import SPEAKING, redact
from inferscale_memory.engine.base import EncodeRequest, SamplingOptions, Span
from inferscale_memory.engine.remote import RemoteEngine
from inferscale_memory.prompt.segments import Prompt, Segment
from tests.models import tiny_model, tiny_tokenizer
from tests.serving import Server

WORDS = "adopted a grey cat called Miso"
OWNER, TAG = "somebody-with-a-name", "the-tag-of-a-fact"


def test_parameters_are_not_shown_with_sampling_parameters() -> None:
    redact()
    redact()
    carried = {"kv_transfer_params": {"inferscale": {"token": "abc", "owner": OWNER}}}
    for shown in (repr(SamplingParams(extra_args=carried)), str(SamplingParams(extra_args=carried))):
        assert OWNER not in shown
        assert "max_tokens=16" in shown
        assert "extra_args=<hidden>" in shown


def test_a_record_keeps_what_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    redact()
    logger = logging.getLogger("vllm.entrypoints.serve.utils.request_logger")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(caplog.handler)
    try:
        logger.debug("Request %s details: prompt: %r, prompt_token_ids: %s", "cmpl-1", WORDS, [1, 2, 3])
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages[-1] == (
        "Request cmpl-1 details: prompt: '<30 characters>', prompt_token_ids: <3 items>"
    )


def test_the_loggers_are_vllms() -> None:
    """A logger that vLLM renames would speak again."""
    import importlib

    for name in SPEAKING:
        assert importlib.import_module(name).logger.name == name


@pytest.mark.engine
def test_a_server_logs_nothing_of_what_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the level that says most, with requests, answers and bodies logged; then its engine dies of a request, and
    dumps what it was doing."""
    monkeypatch.setenv(secret.VARIABLE, "the secret of the tests")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "1")
    model = tiny_model("llama", tmp_path / "model")
    tokenizer = tiny_tokenizer()
    spoken = tokenizer(WORDS)["input_ids"]
    # Token ids that the tokenizer knows and the model has no weights for: on these the engine dies.
    described = json.loads((model / "tokenizer.json").read_text())
    described["added_tokens"] += [
        {
            "id": number,
            "content": f"<|{number}|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number in range(512, 1100)
    ]
    (model / "tokenizer.json").write_text(json.dumps(described))
    options = ("--dtype", "float32", "--max-model-len", "512", "--block-size", "32", "--enforce-eager")
    options += ("--num-gpu-blocks-override", "64", "--enable-log-requests", "--enable-log-outputs")
    said: set[str] = {WORDS, OWNER, TAG, ", ".join(map(str, spoken)), ",".join(map(str, spoken))}
    with Server(str(model), *options, log=tmp_path / "log") as server:
        with RemoteEngine(server.url) as engine:
            ids = tuple(spoken) * 4
            [result] = engine.encode([EncodeRequest(OWNER, ids, (Span(0, len(ids)),), ((TAG, 0),))])
            assert result.error is None
            key = result.refs[0].key
            prompt = Prompt(OWNER, (Segment(ids, key, TAG), Segment(tuple(spoken))))
            answer = engine.generate(prompt, SamplingOptions(max_tokens=8))
            assert answer.injected_tokens == len(ids)
            list(engine.stream(prompt, SamplingOptions(max_tokens=8)))
            assert engine.at_hand(OWNER, [key]) == {key}
            assert engine.forget(OWNER, [key], [TAG]) == 1
            secret_key = secret.from_environment()
            said.add(answer.text)
        message = {"role": "user", "content": WORDS}
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [message], "max_tokens": 4})
        refused = {"messages": [message], "max_tokens": WORDS}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=refused).status_code == 400
        fatal = Inject(OWNER, (), "n", ((TAG, 0),))
        body = {
            "prompt": [*spoken, 1050],
            "max_tokens": 1,
            "cache_salt": "s",
            "kv_transfer_params": protocol.params(fatal, secret_key),
        }
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    log = server.output()
    token = body["kv_transfer_params"][protocol.NAME]["token"]
    assert "Dumping scheduler output for model execution" in log, log[-3000:]
    assert "Received request" in log
    assert "DEBUG" in log
    for words in (*said, token, key):
        assert words not in log, words
