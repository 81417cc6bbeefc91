"""Error classes. `ValueError` is for what a user can cause in a call; these are what a caller may handle."""

from flexfloor.masking import masked


class FlexfloorError(Exception):
    """Base of every error that FlexFloor raises on purpose."""


class ConfigError(FlexfloorError, ValueError):
    """A configuration value that cannot work, refused before any process starts.

    The text always names the key, the value and the fix.
    """

    def __init__(self, key: str, value: object, problem: str, fix: str) -> None:
        self.key = key
        super().__init__(f"{key}={masked(value, key)!r}: {problem}. Fix: {fix}")


class DataError(FlexfloorError, ValueError):
    """A dataset record that cannot be used; the text names the file, the record and the fix."""


class RewardError(FlexfloorError):
    """A reward function failed or ran out of time; the text names the prompt and the response."""


class ChildProcessError(FlexfloorError):
    """A process that FlexFloor started ended or never became ready; the text ends with its last log lines."""


class DeadlineExceeded(FlexfloorError, TimeoutError):
    """A wait reached its deadline; the text says what was waited for and for how long."""


class StaleWeightsError(FlexfloorError):
    """A response was made by another weight_version than the rollout step's."""


class LedgerError(FlexfloorError):
    """The ledger on disk contradicts itself or the request that was made of it."""
