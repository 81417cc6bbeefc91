"""What a caller of the manager or of the driver's client may handle."""

from flexfloor.errors import FlexfloorError


class MembershipFailed(FlexfloorError):
    """The group cannot go on, or its manager has ended; the text says why."""


class FenceRefused(FlexfloorError):
    """The group will not stand still for this control call; the text says why."""
