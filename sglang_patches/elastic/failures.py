"""Which errors of the model's thread mean that the group is broken, not that something else went wrong."""

from torch import distributed as dist

from sglang_patches.cpu.shm_collectives import PeerLostError
from sglang_patches.elastic.groups import GroupBroken

_GLOO_MARKS = ("gloo/", "gloo::")
"""Of gloo's RuntimeErrors, which name the source file that raised them."""


def is_group_failure(error: BaseException) -> bool:
    """True for what a collective raises whose peer is gone, or that was broken by order."""
    if isinstance(error, PeerLostError | GroupBroken | dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(mark in text for mark in _GLOO_MARKS)
