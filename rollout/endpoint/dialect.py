"""A protocol as the endpoint sees it: how its requests are read and its replies are written."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rollout.endpoint.attempt import Attempt, Reply
from rollout.endpoint.request import Asked, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`read` raises Refused. `events` are those of a stream, of which the last ends it; `refusal_event` is written
    where a stream cannot go on."""

    path: str
    read: Callable[[object, Attempt], Asked]
    whole: Callable[[Reply, Asked, str], Mapping[str, object]]
    events: Callable[[Reply, Asked, str], Iterator[str]]
    refusal: Callable[[Refused], Mapping[str, object]]
    refusal_event: Callable[[Refused], str]


def named_event(value: Mapping[str, object]) -> str:
    """A server-sent event that bears the name of its type."""
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n"
