"""An instant is an instant: the same in search, listings, chat and what stands in every prompt, in any time zone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

from inferscale_memory.facts.expiry import ends, is_expired, read_expiration
from tests.memory.conftest import OpenFace
from tests.memory.faces import Settled

ADA = {"user_id": "ada"}
HOUR = timedelta(hours=1)


@pytest.fixture
def zone(request: pytest.FixtureRequest) -> Iterator[str]:
    """The process's time zone; `Test-14` is 14 hours ahead of UTC, as POSIX writes it."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = request.param
    time.tzset()
    yield request.param
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


def now() -> datetime:
    return datetime.now(UTC)


def texts(found: Any) -> list[str]:
    return sorted(row["memory"] for row in found["results"])


OVER = {
    "an instant in UTC": lambda: now() - HOUR,
    "an instant in another zone": lambda: (now() - HOUR).astimezone(timezone(timedelta(hours=9))),
    "a naive time, which is local": lambda: datetime.now() - HOUR,
    "text": lambda: (now() - HOUR).isoformat(),
    "text that ends in Z": lambda: (now() - HOUR).strftime("%Y-%m-%dT%H:%M:%SZ"),
}


@pytest.mark.parametrize("when", OVER.values(), ids=OVER.keys())
def test_what_ended_an_hour_ago_is_nowhere(either: Settled, when: Any) -> None:
    either.add("The offer of plums", infer=False, expiration_date=when(), **ADA)
    either.add("The offer of pears", infer=False, expiration_date=now() + HOUR, **ADA)
    assert texts(either.get_all(filters=ADA)) == ["The offer of pears"]
    assert texts(either.search("The offer", filters=ADA)) == ["The offer of pears"]
    reply = either.chat("What is the offer?", **ADA, max_tokens=1)
    assert [memory.text for memory in reply.memories] == ["The offer of pears"]
    shown = either.get_all(filters=ADA, show_expired=True)
    assert texts(shown) == ["The offer of pears", "The offer of plums"]
    assert len(either.search("The offer", filters=ADA, show_expired=True)["results"]) == 2


def test_what_stands_in_every_prompt_ends_too(open_face: OpenFace) -> None:
    for injection in ({"full_memory_tokens": 1000}, {"pinned": "pinned"}):
        memory = open_face(injection=injection)
        memory.add("Plums", infer=False, metadata={"pinned": True}, expiration_date=now() - HOUR, **ADA)
        assert memory.chat("What?", **ADA, max_tokens=1).memories == ()


def test_an_end_can_be_moved_and_taken_away(either: Settled) -> None:
    [made] = either.add("The offer", infer=False, expiration_date=now() + HOUR, **ADA)["results"]
    either.update(made["id"], expiration_date=now() - HOUR)
    assert texts(either.get_all(filters=ADA)) == []
    either.update(made["id"], expiration_date=now().date().isoformat())
    assert texts(either.get_all(filters=ADA)) == ["The offer"]
    either.update(made["id"], expiration_date=now() - HOUR)
    either.update(made["id"], expiration_date=None)
    assert texts(either.get_all(filters=ADA)) == ["The offer"]
    assert [memory.text for memory in either.chat("What?", **ADA, max_tokens=1).memories] == ["The offer"]


def test_expire_deletes_what_ended_a_moment_ago(either: Settled) -> None:
    either.add("The offer", infer=False, expiration_date=now() - timedelta(seconds=1), **ADA)
    assert either.expire() == 1
    assert either.get_all(filters=ADA, show_expired=True)["results"] == []


@pytest.mark.parametrize("zone", ["Test-14", "UTC", "Test+12"], indirect=True)
def test_a_day_ends_when_it_ends_where_the_process_is(zone: str) -> None:
    today = datetime.now().date()
    assert not is_expired(payload(today))
    assert not is_expired(payload(today.isoformat()))
    assert is_expired(payload(today - timedelta(days=1)))
    end = ends(payload(date(2030, 5, 12)))
    assert end is not None
    assert end == datetime(2030, 5, 13).astimezone() - timedelta(microseconds=1)
    assert payload(date(2030, 5, 12))["expiration_date"] == "2030-05-12", "what mem0 shows is what was said"


@pytest.mark.parametrize("zone", ["Test-14", "Test+12"], indirect=True)
def test_the_end_that_was_meant_holds_in_processes_of_other_zones(zone: str) -> None:
    kept = payload(date(2030, 5, 12))
    end = ends(kept)
    os.environ["TZ"] = "UTC"
    time.tzset()
    assert ends(kept) == end


@pytest.mark.parametrize("zone", ["UTC"], indirect=True)
def test_a_day_in_utc_is_kept_as_mem0_keeps_it(zone: str) -> None:
    assert payload("2030-05-12") == {"expiration_date": "2030-05-12"}
    assert ends({"expiration_date": "2030-05-12"}) == datetime(2030, 5, 12, 23, 59, 59, 999999, tzinfo=UTC)


def test_an_instant_that_another_program_left_behind_does_not_count() -> None:
    kept = {**payload(datetime(2020, 1, 1, tzinfo=UTC)), "expiration_date": "2999-01-01"}
    assert not is_expired(kept)


def payload(value: Any) -> dict[str, Any]:
    day, moment = read_expiration(value)
    return {"expiration_date": day} if moment is None else {"expiration_date": day, "expiration_time": moment}
