"""Hooks on sglang.srt.utils.auth."""

from collections.abc import Callable
from typing import Any


def let_own_routes_check(original: Callable[..., Any], *, path: str, **request: Any) -> Any:
    """Around `decide_request_auth`: routes under /flexfloor/ check the caller themselves."""
    from sglang.srt.utils.auth import AuthDecision

    from sglang_patches import server_side
    from sglang_patches.http.auth import PREFIX

    if path.startswith(PREFIX) and server_side.current() is not None:
        return AuthDecision(allowed=True)
    return original(path=path, **request)
