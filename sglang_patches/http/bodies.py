"""Bodies of the changing routes: typed, bounded, and refused with one clear text. PURE."""

from typing import Annotated, Literal, TypeVar

import msgspec

MAX_BODY_BYTES = 1 << 16
MAX_WAIT_S = 3600.0

OperationId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")]
Ranks = Annotated[list[int], msgspec.Meta(min_length=1, max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Wait = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]


class BadBody(ValueError):
    """The text says what is wrong with it and what is expected."""


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ep_ranks: Ranks | None = None
    num_ranks: Count | None = None
    """So many, chosen by the server."""
    operation_id: OperationId | None = None
    wait_s: Wait = 0.0
    """How long the answer may wait for the result."""


class ReleaseBody(_Order, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `ep_ranks` and `num_ranks`."""

    leave: Literal["park", "exit"] = "park"


class RejoinBody(_Order, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """At most one of `ep_ranks` and `num_ranks`; none: all that are parked or on their way there."""


class RolloutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    action: Literal["begin", "end"]
    rollout_step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None


Body = TypeVar("Body", ReleaseBody, RejoinBody, RolloutBody)

_EXPECTED: dict[type, str] = {
    ReleaseBody: '{"ep_ranks": [2, 3]} or {"num_ranks": 2}; also "leave", "operation_id", "wait_s"',
    RejoinBody: '{}, {"ep_ranks": [2, 3]} or {"num_ranks": 2}; also "operation_id", "wait_s"',
    RolloutBody: '{"action": "begin"} or {"action": "end"}; also "rollout_step"',
}


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Raises BadBody. An empty body is an empty object."""
    try:
        if len(raw) > MAX_BODY_BYTES:
            raise BadBody(f"{len(raw)} of at most {MAX_BODY_BYTES} bytes")
        body: Body = msgspec.json.decode(raw or b"{}", type=kind)
        _check(body)
    except (BadBody, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadBody(f"the body cannot be used: {text}. Fix: send {_EXPECTED[kind]}") from error
    return body


def _check(body: ReleaseBody | RejoinBody | RolloutBody) -> None:
    if isinstance(body, RolloutBody):
        return
    if body.ep_ranks is not None and body.num_ranks is not None:
        raise BadBody("it has both ep_ranks and num_ranks")
    if isinstance(body, ReleaseBody) and body.ep_ranks is None and body.num_ranks is None:
        raise BadBody("it has neither ep_ranks nor num_ranks")
