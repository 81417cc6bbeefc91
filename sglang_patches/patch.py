"""The form of a row of the catalog."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One hook on one function of SGLang."""

    target: str
    """Dotted path of the function or method."""
    hook: str
    """`module:function` in `sglang_patches/hooks/`; the module is named like the patched one."""
    hook_type: Literal["before", "after", "around", "replace"]
    process: str
    """The process in which the hook does something; it is installed in all of them."""
    why: str
    upstream: str
    """Issue or pull request of SGLang, or why there is none."""
    remove_when: str
    checked: dict[str, str]
    """SGLang version -> digest of the target's source text."""
    device: Literal["cpu", "any"] = "any"
    """`cpu`: active only when the server runs with `--device cpu`."""
    collectives: Literal["gloo", "shm", "any"] = "any"
    """Active only with this value of `--flexfloor-collectives`."""
    membership: Literal["elastic", "any"] = "any"
    """`elastic`: active only with `--flexfloor-membership elastic`."""
    iteration_log: Literal["on", "any"] = "any"
    """`on`: active only with `--flexfloor-iteration-log`."""
