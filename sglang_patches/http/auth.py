"""Who may read and who may change the membership over HTTP. PURE.

SGLang's own levels do not fit: with an API key and no admin key none of them lets the per-run token pass. So
its check lets the paths below through, and each route asks here.
"""

import hmac
from dataclasses import dataclass, field

PREFIX = "/flexfloor/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What a caller may show as `Authorization: Bearer ...`; an empty text: there is no such key."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    """The per-run token of the endpoint's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    status: int
    reason: str


def refusal(authorization: str | None, keys: Keys, *, changes: bool) -> Refusal | None:
    """Why a request may not go on; None: it may. Who may change may read as well."""
    changers = [keys.admin] if keys.admin else [keys.token]
    allowed = changers if changes else [*changers, keys.api]
    if not changes and not keys.api:
        return None
    if not any(allowed):
        fix = "start the server with --admin-api-key KEY, or with --flexfloor-folder FOLDER for its token"
        return Refusal(
            status=403, reason=f"nobody may change this server: it has neither key nor token. Fix: {fix}"
        )
    shown = _bearer(authorization)
    if any(key and hmac.compare_digest(shown, key.encode()) for key in allowed):
        return None
    return Refusal(status=401, reason=f"{_problem(authorization)}. Fix: {_fix(keys, changes=changes)}")


def _problem(authorization: str | None) -> str:
    return "the key is not the right one" if authorization else "there is no Authorization header"


def _fix(keys: Keys, *, changes: bool) -> str:
    if not changes:
        return "send Authorization: Bearer with the server's API key"
    if keys.admin:
        return "send Authorization: Bearer with the server's admin API key; its API key changes nothing"
    return "send Authorization: Bearer with the text of the file token in the server's --flexfloor-folder"


def _bearer(authorization: str | None) -> bytes:
    scheme, _, shown = (authorization or "").partition(" ")
    # Headers arrive as Latin-1; what was sent is compared.
    return shown.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
