"""Who may read and who may change."""

import pytest

from sglang_patches.http.auth import Keys, refusal

TOKEN, API, ADMIN = "Bearer tok", "Bearer sek", "Bearer adm"
NONE, OPEN = Keys(), Keys(token="tok")
BOTH = Keys(api="sek", admin="adm", token="tok")


def status(authorization: str | None, keys: Keys, *, changes: bool) -> int:
    refused = refusal(authorization, keys, changes=changes)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize(
    ("keys", "reads", "changes"),
    [
        # Shown: nothing, the token, the API key, the admin key.
        (OPEN, (200, 200, 200, 200), (401, 200, 401, 401)),
        (Keys(api="sek", token="tok"), (401, 200, 200, 401), (401, 200, 401, 401)),
        (Keys(admin="adm", token="tok"), (200, 200, 200, 200), (401, 401, 401, 200)),
        (BOTH, (401, 401, 200, 200), (401, 401, 401, 200)),
        (NONE, (200, 200, 200, 200), (403, 403, 403, 403)),
        (Keys(api="sek"), (401, 401, 200, 401), (403, 403, 403, 403)),
    ],
)
def test_keys(keys: Keys, reads: tuple[int, ...], changes: tuple[int, ...]) -> None:
    shown = (None, TOKEN, API, ADMIN)
    assert tuple(status(one, keys, changes=False) for one in shown) == reads
    assert tuple(status(one, keys, changes=True) for one in shown) == changes


@pytest.mark.parametrize(
    "shown", ["tok", "Bearer", "Bearer ", "Basic tok", "Bearer tok2", "Bearer \xe9\u20ac", ""]
)
def test_what_is_no_bearer_of_the_token_is_refused(shown: str) -> None:
    assert status(shown, OPEN, changes=True) == 401


@pytest.mark.parametrize("shown", ["bearer tok", "BEARER  tok "])
def test_scheme_and_spaces_are_as_http_has_them(shown: str) -> None:
    assert status(shown, OPEN, changes=True) == 200


def test_a_refusal_says_what_to_send_and_shows_no_key() -> None:
    for keys, changes in ((OPEN, True), (BOTH, True), (BOTH, False), (NONE, True)):
        refused = refusal("Bearer wrong", keys, changes=changes)
        assert refused is not None
        assert "Fix: s" in refused.reason
        assert not {"tok", "sek", "adm"} & set(refused.reason.replace(".", "").split())
    assert "adm" not in repr(BOTH)
