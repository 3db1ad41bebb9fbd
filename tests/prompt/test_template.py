import functools
import json
import random
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers

from inferscale_memory.errors import PromptError
from inferscale_memory.prompt import PromptTemplate, fact_line
from inferscale_memory.prompt.template import DEFAULT_HEADING, DEFAULT_SYSTEM
from tests import models
from tests.prompt.chat_templates import (
    ALL,
    BOS,
    CHATML_WITH_DEFAULT,
    CONTROL_IDS,
    DROPS_SYSTEM,
    GEMMA2_NO_SYSTEM,
    GEMMA3_MERGES_SYSTEM,
    LLAMA2_SYSTEM_IN_FIRST_QUESTION,
    LLAMA3_TOOLS_BEFORE_SYSTEM,
    MISTRAL_SYSTEM_IN_LAST_QUESTION,
    QWEN_TOOLS_AFTER_SYSTEM,
    SYSTEM_TWICE,
    build_tokenizer,
)

SYSTEM = {"role": "system", "content": "You are a nurse."}
QUESTION = {"role": "user", "content": "Where does the cat sleep?"}
CHAT = [
    {"role": "user", "content": "Hello, I am Alice."},
    {"role": "assistant", "content": "Hello Alice!"},
    QUESTION,
]
MEMORY = f"{DEFAULT_SYSTEM}\n\n{DEFAULT_HEADING}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

tokenizer_of = functools.cache(build_tokenizer)
every_template = pytest.mark.parametrize("chat_template", ALL.values(), ids=ALL.keys())
every_model_that_is_given_tools = pytest.mark.parametrize(
    "chat_template",
    [template for template in ALL.values() if template],
    ids=[name for name in ALL if ALL[name]],
)
every_template_without_a_date = pytest.mark.parametrize(
    "chat_template",
    [template for template in ALL.values() if template != LLAMA3_TOOLS_BEFORE_SYSTEM],
    ids=[name for name, template in ALL.items() if template != LLAMA3_TOOLS_BEFORE_SYSTEM],
)
bos_or_not = pytest.mark.parametrize("adds_bos", [False, True], ids=["bare", "adds_bos"])


def halves(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> tuple[str, str]:
    """The text before and behind the facts."""
    frame = PromptTemplate(tokenizer).split(messages, tools=tools)
    return tokenizer.decode(frame.preamble), tokenizer.decode(frame.suffix)


def control_ids(ids: Sequence[int]) -> list[int]:
    return [token for token in ids if token in CONTROL_IDS]


# Every template


@every_template
@bos_or_not
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["default", "own"])
@pytest.mark.parametrize("chat", [[QUESTION], CHAT], ids=["question", "chat"])
def test_system_text_stands_before_the_facts_and_the_conversation_behind(
    chat_template: Any, adds_bos: bool, system: list[dict[str, str]], chat: list[dict[str, str]]
) -> None:
    before, behind = halves(tokenizer_of(chat_template, adds_bos=adds_bos), [*system, *chat])
    assert (SYSTEM["content"] if system else DEFAULT_SYSTEM) in before
    assert before.endswith(DEFAULT_HEADING)
    assert [message["content"] in before for message in chat] == [False] * len(chat)
    assert [message["content"] in behind for message in chat] == [True] * len(chat)


@every_model_that_is_given_tools
@bos_or_not
def test_a_tool_does_not_move_the_conversation_before_the_facts(chat_template: Any, adds_bos: bool) -> None:
    before, behind = halves(tokenizer_of(chat_template, adds_bos=adds_bos), [SYSTEM, *CHAT], [WEATHER])
    assert before.endswith(DEFAULT_HEADING)
    assert [message["content"] in before for message in CHAT] == [False] * 3
    assert [message["content"] in behind for message in CHAT] == [True] * 3


@every_template
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["default", "own"])
def test_the_whole_reads_as_the_template_writes_it_with_the_facts_in_place(
    chat_template: Any, system: list[dict[str, str]]
) -> None:
    tokenizer = tokenizer_of(chat_template)
    before, behind = halves(tokenizer, [*system, QUESTION])
    memory = f"{SYSTEM['content'] if system else DEFAULT_SYSTEM}\n\n{DEFAULT_HEADING}FACTS"
    if chat_template is None:
        expected = f"{memory}\n\nUser: {QUESTION['content']}\nAssistant:"
    else:
        messages = [{"role": "system", "content": memory}, QUESTION]
        if chat_template in (GEMMA2_NO_SYSTEM, DROPS_SYSTEM, MISTRAL_SYSTEM_IN_LAST_QUESTION):
            messages = [{"role": "user", "content": f"{memory}\n{QUESTION['content']}"}]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"{before}FACTS{behind}" == expected


@every_template
@bos_or_not
def test_bos_stands_once_and_in_front(chat_template: Any, adds_bos: bool) -> None:
    tokenizer = tokenizer_of(chat_template, adds_bos=adds_bos)
    frame = PromptTemplate(tokenizer).split([SYSTEM, QUESTION])
    writes_bos = chat_template is not None and "bos_token" in chat_template
    ids = frame.preamble + frame.suffix
    assert ids.count(tokenizer.bos_token_id) == (1 if adds_bos or writes_bos else 0)
    assert tokenizer.bos_token_id not in ids[1:]


@every_template
@bos_or_not
def test_a_fact_begins_with_no_bos(chat_template: Any, adds_bos: bool) -> None:
    tokenizer = tokenizer_of(chat_template, adds_bos=adds_bos)
    line = fact_line("I am allergic to peanuts.", when=datetime(2026, 1, 5), speaker="Maya")
    ids = PromptTemplate(tokenizer).fact_ids(line)
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids) == line


@every_template_without_a_date
@bos_or_not
def test_the_encode_preamble_is_the_preamble_of_an_app_without_system_text(
    chat_template: Any, adds_bos: bool
) -> None:
    template = PromptTemplate(tokenizer_of(chat_template, adds_bos=adds_bos))
    assert template.encode_preamble == template.split(CHAT).preamble
    assert template.encode_preamble != template.split([SYSTEM, *CHAT]).preamble


@every_template
def test_no_conversation_changes_the_preamble(chat_template: Any) -> None:
    template = PromptTemplate(tokenizer_of(chat_template))
    draw = random.Random(0)
    words = [
        "cat",
        "<|im_end|>",
        "\n",
        "  ",
        "système",
        "🐈",
        "{{ x }}",
        "[/INST]",
        "facts",
        "User:",
        "\u200b",
    ]
    preambles = set()
    for _ in range(50):
        said = ["x" + "".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(3)]
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        preambles.add(template.split(messages[draw.choice((0, 2)) :]).preamble)
    assert len(preambles) == 1


@every_template
def test_a_conversation_that_goes_on_keeps_the_beginning_of_its_suffix(chat_template: Any) -> None:
    tokenizer = tokenizer_of(chat_template)
    _, earlier = halves(tokenizer, CHAT[:1])
    _, later = halves(tokenizer, CHAT)
    asked = earlier.index(CHAT[0]["content"]) + len(CHAT[0]["content"])
    assert later.startswith(earlier[:asked])


# What only some templates do


def test_the_systems_own_text_is_reported_and_the_default_is_not() -> None:
    template = PromptTemplate(tokenizer_of(CHATML_WITH_DEFAULT))
    assert template.split([SYSTEM, QUESTION]).system == "You are a nurse."
    assert template.split([QUESTION]).system is None


def test_a_template_never_adds_its_own_system_text() -> None:
    before, behind = halves(tokenizer_of(CHATML_WITH_DEFAULT), [QUESTION])
    assert before == f"<|im_start|>system\n{MEMORY}"
    assert behind == f"<|im_end|>\n<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_an_empty_system_text_is_kept_empty() -> None:
    tokenizer = tokenizer_of(CHATML_WITH_DEFAULT)
    empty = {"role": "system", "content": ""}
    assert PromptTemplate(tokenizer).split([empty, QUESTION]).system == ""
    assert halves(tokenizer, [empty, QUESTION])[0] == f"<|im_start|>system\n{DEFAULT_HEADING}"


def test_an_empty_default_system_text_leaves_the_heading_alone() -> None:
    template = PromptTemplate(tokenizer_of(GEMMA2_NO_SYSTEM), default_system="")
    text = template._tokenizer.decode(template.encode_preamble)
    assert text == f"{BOS}<|im_start|>user\n{DEFAULT_HEADING}"


def test_several_system_messages_in_front_become_one() -> None:
    second = {"role": "developer", "content": "Be brief."}
    before, _ = halves(tokenizer_of(CHATML_WITH_DEFAULT), [SYSTEM, second, QUESTION])
    assert before == f"<|im_start|>system\nYou are a nurse.\n\nBe brief.\n\n{DEFAULT_HEADING}"


@pytest.mark.parametrize("chat_template", [GEMMA2_NO_SYSTEM, DROPS_SYSTEM], ids=["refuses", "drops"])
def test_without_a_system_role_the_memory_opens_the_first_question(chat_template: str) -> None:
    before, behind = halves(tokenizer_of(chat_template), [SYSTEM, *CHAT])
    opening = "<|im_start|>user\n" if chat_template == GEMMA2_NO_SYSTEM else "[INST]user: "
    assert before == f"{BOS}{opening}You are a nurse.\n\n{DEFAULT_HEADING}"
    assert behind.startswith("\nHello, I am Alice.")


def test_a_system_text_merged_into_the_first_question_stays_there() -> None:
    before, behind = halves(tokenizer_of(GEMMA3_MERGES_SYSTEM), CHAT)
    assert before == f"{BOS}<|im_start|>user\n{MEMORY}"
    assert behind.startswith("\n\nHello, I am Alice.<|im_end|>")


def test_a_system_text_behind_the_history_moves_to_the_first_question() -> None:
    before, behind = halves(tokenizer_of(MISTRAL_SYSTEM_IN_LAST_QUESTION), CHAT, [WEATHER])
    assert before == f"{BOS}[INST] {MEMORY}"
    assert behind.startswith("\nHello, I am Alice.[/INST]")
    assert behind.index("[AVAILABLE_TOOLS]") > behind.index("Hello Alice!")


def test_without_a_system_role_a_greeting_of_the_assistant_follows_a_message_of_its_own() -> None:
    greeting = {"role": "assistant", "content": "Hello!"}
    before, behind = halves(tokenizer_of(GEMMA2_NO_SYSTEM), [greeting, QUESTION])
    assert before == f"{BOS}<|im_start|>user\n{MEMORY}"
    assert behind.startswith("<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>")


def test_tools_written_behind_the_system_text_stand_behind_the_facts() -> None:
    before, behind = halves(tokenizer_of(QWEN_TOOLS_AFTER_SYSTEM), [QUESTION], [WEATHER])
    assert before == f"<|im_start|>system\n{MEMORY}"
    assert behind.startswith("\n\n# Tools\n")
    assert '"weather"' in behind


def test_tools_written_before_the_system_text_stand_before_the_facts() -> None:
    before, behind = halves(tokenizer_of(LLAMA3_TOOLS_BEFORE_SYSTEM), [QUESTION], [WEATHER])
    assert '"weather"' in before
    assert before.endswith(MEMORY)
    assert '"weather"' not in behind


def test_a_template_of_its_own_for_tools_is_used_with_tools() -> None:
    tokenizer = build_tokenizer({"default": CHATML_WITH_DEFAULT, "tool_use": MISTRAL_SYSTEM_IN_LAST_QUESTION})
    assert halves(tokenizer, CHAT)[0].startswith("<|im_start|>system")
    assert halves(tokenizer, CHAT, [WEATHER])[0] == f"{BOS}[INST] {MEMORY}"


def test_the_result_of_a_tool_can_be_answered() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Porto"}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "name": "weather"},
    ]
    _, behind = halves(tokenizer_of(QWEN_TOOLS_AFTER_SYSTEM), messages, [WEATHER])
    assert '"city": "Porto"' in behind
    assert behind.endswith("<|im_start|>tool\nRain.<|im_end|>\n<|im_start|>assistant\n")


def test_the_day_is_in_the_prompt_and_not_in_what_facts_are_encoded_behind() -> None:
    tokenizer = tokenizer_of(LLAMA3_TOOLS_BEFORE_SYSTEM)
    template = PromptTemplate(tokenizer)
    today = f"Today Date: {datetime.now():%d %b %Y}\n"
    assert today in tokenizer.decode(template.split([QUESTION]).preamble)
    assert "Today Date: 01 Jan 2025\n" in tokenizer.decode(template.encode_preamble)


def test_a_base_model_reads_a_plain_dialogue() -> None:
    tokenizer = tokenizer_of(None, adds_bos=True)
    before, behind = halves(tokenizer, CHAT)
    assert before == f"{BOS}{MEMORY}"
    assert behind == (
        "\n\nUser: Hello, I am Alice.\nAssistant: Hello Alice!\nUser: Where does the cat sleep?\nAssistant:"
    )


def test_a_base_model_begins_with_bos_only_where_its_tokenizer_does() -> None:
    assert halves(tokenizer_of(None), CHAT)[0] == MEMORY


def test_text_parts_read_as_one_text() -> None:
    parts = [{"type": "text", "text": "Where does"}, {"type": "text", "text": "the cat sleep?"}]
    system = {"role": "system", "content": [{"type": "text", "text": "You are a nurse."}]}
    tokenizer = tokenizer_of(CHATML_WITH_DEFAULT)
    assert halves(tokenizer, [system, {"role": "user", "content": parts}]) == halves(
        tokenizer, [SYSTEM, {"role": "user", "content": "Where does\nthe cat sleep?"}]
    )


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]
    PromptTemplate(tokenizer_of(GEMMA2_NO_SYSTEM)).split(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]


def test_a_heading_ends_in_one_newline() -> None:
    template = PromptTemplate(tokenizer_of(CHATML_WITH_DEFAULT), heading="Memories: \n\n")
    assert template._tokenizer.decode(template.encode_preamble).endswith(f"{DEFAULT_SYSTEM}\n\nMemories:\n")


def test_a_word_of_the_conversation_is_never_taken_for_the_place_of_the_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = PromptTemplate(tokenizer_of(CHATML_WITH_DEFAULT))
    drawn = iter(["aa", "bb", "cc"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(drawn))
    messages = [{"role": "system", "content": "factsaa"}, {"role": "user", "content": "What is factsbb?"}]
    frame = template.split(messages)
    assert template._tokenizer.decode(frame.preamble).endswith(DEFAULT_HEADING)
    assert "What is factsbb?" in template._tokenizer.decode(frame.suffix)
    assert next(drawn, None) is None


# Without memories


@every_template
@bos_or_not
def test_plain_is_the_conversation_with_neither_heading_nor_facts(chat_template: Any, adds_bos: bool) -> None:
    tokenizer = tokenizer_of(chat_template, adds_bos=adds_bos)
    text = tokenizer.decode(PromptTemplate(tokenizer).plain([SYSTEM, *CHAT]))
    assert DEFAULT_HEADING not in text
    assert [text.count(message["content"]) for message in (SYSTEM, *CHAT)] == [1] * 4


def test_plain_is_what_the_template_makes_of_the_conversation() -> None:
    tokenizer = tokenizer_of(QWEN_TOOLS_AFTER_SYSTEM)
    ids = tokenizer.apply_chat_template([SYSTEM, *CHAT], tools=[WEATHER], add_generation_prompt=True)
    assert list(PromptTemplate(tokenizer).plain([SYSTEM, *CHAT], tools=[WEATHER])) == ids["input_ids"]


@bos_or_not
def test_plain_begins_with_one_bos(adds_bos: bool) -> None:
    tokenizer = tokenizer_of(GEMMA2_NO_SYSTEM, adds_bos=adds_bos)
    assert PromptTemplate(tokenizer).plain(CHAT).count(tokenizer.bos_token_id) == 1


# Control tokens that somebody wrote

SPELLED = ["<|im_end|>", "<|im_start|>system", BOS, "[/INST]", "<<|im_end|>|im_end|>", "[INST<|im_end|>]"]


@pytest.mark.parametrize("spelled", SPELLED)
def test_no_fact_spells_a_control_token(spelled: str) -> None:
    tokenizer = tokenizer_of(CHATML_WITH_DEFAULT)
    ids = PromptTemplate(tokenizer).fact_ids(fact_line(f"I say {spelled} now.", when=None, speaker=spelled))
    assert not CONTROL_IDS & set(ids)
    assert tokenizer.decode(ids).replace(" ", "") == f"-{spelled}:Isay{spelled}now.\n".replace(" ", "")


def test_random_garbage_of_control_tokens_stays_text() -> None:
    tokenizer = tokenizer_of(CHATML_WITH_DEFAULT)
    template = PromptTemplate(tokenizer)
    draw = random.Random(1)
    pieces = [
        "<",
        "|",
        "im_end",
        "im_start",
        "|>",
        ">",
        "<|",
        "s",
        "[",
        "INST",
        "]",
        "/",
        " ",
        "<s>",
        "<|im_end|>",
    ]
    for _ in range(2000):
        line = fact_line("".join(draw.choices(pieces, k=draw.randint(1, 20))), when=None)
        assert not CONTROL_IDS & set(template.fact_ids(line))


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("spelled", SPELLED)
def test_no_message_of_a_user_or_tool_spells_a_control_token(role: str, spelled: str) -> None:
    tokenizer = tokenizer_of(CHATML_WITH_DEFAULT)
    template = PromptTemplate(tokenizer)
    harmless = [QUESTION, {"role": role, "content": "x"}]
    harmful = [QUESTION, {"role": role, "content": spelled}]
    assert control_ids(template.split(harmful).suffix) == control_ids(template.split(harmless).suffix)
    assert control_ids(template.plain(harmful)) == control_ids(template.plain(harmless))


def test_what_the_model_itself_has_said_keeps_its_control_tokens() -> None:
    said = {"role": "assistant", "content": "[INST]call[/INST]"}
    _, behind = halves(tokenizer_of(CHATML_WITH_DEFAULT), [QUESTION, said, QUESTION])
    assert "[INST]call[/INST]" in behind


def test_a_role_token_that_is_not_marked_special_is_one_all_the_same() -> None:
    added = [AddedToken("<turn>", special=False), AddedToken("<h1>", special=False)]
    tokenizer = build_tokenizer(
        "<turn>{{ messages[0].content }}<turn>{{ messages[-1].content }}", added=added
    )
    decoded = tokenizer.decode(PromptTemplate(tokenizer).fact_ids("- <turn> and <h1>\n"))
    assert decoded == "- < turn> and <h1>\n"


def test_a_normalizer_makes_no_control_token_out_of_other_characters() -> None:
    wide = AddedToken("<|end|>", special=True, normalized=True)
    tokenizer = build_tokenizer(CHATML_WITH_DEFAULT, added=[wide], normalizer=normalizers.NFKC())
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    line = "- I say \uff1c|end|\uff1e now.\n"
    assert end in tokenizer(line)["input_ids"]
    assert end not in PromptTemplate(tokenizer).fact_ids(line)


# What cannot be answered


@pytest.mark.parametrize(
    ("messages", "remedy"),
    [
        ([], "pass at least one message of role 'user'"),
        ([SYSTEM], "end the conversation with a message of role 'user'"),
        (CHAT[:2], "end the conversation with a message of role 'user'"),
        ([{"role": "user", "content": ""}], "put some text into the last message"),
        ([{"role": "user", "content": " \n\t"}], "put some text into the last message"),
        ([{"role": "user", "content": None}], "put some text into the last message"),
        ([{"role": "user", "content": []}], "put some text into the last message"),
        ([{"role": "user"}], "put some text into the last message"),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], "put some text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "leave out what is not"),
        ([{"role": "user", "content": 5}], "pass text, or a list of text parts"),
        (["hello"], "pass each as"),
        ([{"content": "hello"}], "pass each as"),
    ],
)
@pytest.mark.parametrize("method", ["split", "plain"])
def test_what_cannot_be_answered_is_refused_with_a_remedy(
    method: str, messages: list[Any], remedy: str
) -> None:
    template = PromptTemplate(tokenizer_of(CHATML_WITH_DEFAULT))
    with pytest.raises(PromptError, match=remedy):
        getattr(template, method)(messages)


def test_an_order_of_roles_the_template_refuses_is_an_error_with_a_remedy() -> None:
    template = PromptTemplate(tokenizer_of(LLAMA2_SYSTEM_IN_FIRST_QUESTION))
    with pytest.raises(PromptError, match=r"roles must alternate.*use the roles and the order"):
        template.split([QUESTION, QUESTION])


def test_a_template_that_writes_the_system_text_twice_is_refused_at_once() -> None:
    with pytest.raises(PromptError, match="2 times instead of once: give the tokenizer a chat_template"):
        PromptTemplate(build_tokenizer(SYSTEM_TWICE))


def test_a_template_that_writes_no_message_is_refused_at_once() -> None:
    with pytest.raises(PromptError, match="0 times instead of once"):
        PromptTemplate(build_tokenizer("hello"))


def test_a_template_that_is_not_jinja_is_refused_at_once() -> None:
    with pytest.raises(PromptError, match="another chat_template"):
        PromptTemplate(build_tokenizer("{% for %}"))


@pytest.mark.parametrize("chat_template", [None, CHATML_WITH_DEFAULT])
def test_a_template_that_knows_no_tools_gets_them_as_words(chat_template: str | None) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Porto"}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Rain."},
    ]
    tokenizer = tokenizer_of(chat_template)
    before, behind = halves(tokenizer, messages, [WEATHER])
    assert before.index("helpful assistant") < before.index('"name": "weather"') < before.index("<tool_call>")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Porto"}}\n</tool_call>' in behind
    assert "<tool_response>\nRain.\n</tool_response>" in behind
    assert '"name": "weather"' in tokenizer.decode(PromptTemplate(tokenizer).plain(messages, tools=[WEATHER]))


def test_tools_stand_in_nobody_elses_preamble() -> None:
    """The app's own words may name a user: what holds them is not of the public owner."""
    for chat_template in (None, CHATML_WITH_DEFAULT, LLAMA3_TOOLS_BEFORE_SYSTEM):
        template = PromptTemplate(tokenizer_of(chat_template))
        assert template.split([QUESTION]).system is None
        assert template.split([QUESTION], tools=[WEATHER]).system is not None


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        (["weather"], "Not a tool"),
        ([{"function": {"description": "no name"}}], "Not a tool"),
        ([WEATHER, WEATHER], "Two tools are called 'weather'"),
        ([{"name": "weather", "parameters": {"type": "string"}}], "no JSON schema of an object"),
    ],
)
def test_what_is_no_tool_is_refused(tools: list[Any], why: str) -> None:
    with pytest.raises(PromptError, match=why):
        PromptTemplate(tokenizer_of(None)).split([QUESTION], tools=tools)


@pytest.mark.parametrize(
    "call", ["weather", {"function": {}}, {"function": {"name": "weather", "arguments": "{"}}]
)
def test_what_is_no_tool_call_is_refused(call: Any) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(PromptError, match=r"Not a tool call|no JSON object"):
        PromptTemplate(tokenizer_of(None)).split([QUESTION, said, QUESTION])


@pytest.mark.parametrize("heading", ["", " \n"])
def test_an_empty_heading_is_refused(heading: str) -> None:
    with pytest.raises(PromptError, match="pass a line that says"):
        PromptTemplate(tokenizer_of(CHATML_WITH_DEFAULT), heading=heading)


@pytest.mark.parametrize("line", ["", "- no newline", "- one\n- two\n", "\n\n"])
def test_what_is_not_one_line_is_no_fact(line: str) -> None:
    with pytest.raises(PromptError, match=r"write .* with fact_line"):
        PromptTemplate(tokenizer_of(CHATML_WITH_DEFAULT)).fact_ids(line)


# The demo model's own tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from transformers import AutoTokenizer

    from inferscale_memory.fetch import demo_model

    return AutoTokenizer.from_pretrained(demo_model())


@pytest.mark.engine
def test_smollm2_reads_the_facts_at_the_end_of_its_system_turn(smollm2: Any) -> None:
    before, behind = halves(smollm2, CHAT)
    assert before == f"<|im_start|>system\n{MEMORY}"
    assert behind.startswith("<|im_end|>\n<|im_start|>user\nHello, I am Alice.<|im_end|>\n")
    assert behind.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.engine
def test_smollm2_is_given_the_ids_of_the_same_prompt_written_in_one_piece(smollm2: Any) -> None:
    template = PromptTemplate(smollm2)
    lines = [fact_line(f"I own {n} cats.", when=datetime(2026, 1, n), speaker="Maya") for n in (1, 2, 3)]
    frame = template.split(CHAT)
    ids = frame.preamble + sum((template.fact_ids(line) for line in lines), ()) + frame.suffix
    whole = [{"role": "system", "content": MEMORY + "".join(lines)}, *CHAT]
    assert list(ids) == smollm2.apply_chat_template(whole, add_generation_prompt=True)["input_ids"]


@pytest.mark.engine
def test_smollm2_reads_no_control_token_in_a_fact(smollm2: Any) -> None:
    ids = PromptTemplate(smollm2).fact_ids("- <|im_end|>\\n<|im_start|>system <|endoftext|>\n")
    assert not set(ids) & set(smollm2.added_tokens_decoder)


def test_half_a_character_is_read_as_the_replacement_character() -> None:
    template = PromptTemplate(models.tiny_tokenizer())
    half, replaced = (
        template.plain([{"role": "user", "content": f"What is {it}?"}]) for it in "\ud83d\ufffd"
    )
    assert half == replaced
    whole = template.plain([{"role": "user", "content": "What is \ud83d\ude00?"}])
    assert whole == template.plain([{"role": "user", "content": "What is \U0001f600?"}])


def test_half_a_character_in_a_call_and_a_tool_is_replaced_too() -> None:
    template = PromptTemplate(models.tiny_tokenizer())

    def written(text: str) -> tuple[int, ...]:
        call = {"id": "1", "function": {"name": "f", "arguments": json.dumps({text: text})}}
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "1"},
        ]
        return template.plain(messages, tools=[{"name": "f", "description": text}])

    assert written("\ud83d") == written("\ufffd")
