"""Which prompt groups of a running step are complete. PURE."""

from collections.abc import Sequence

from flexfloor.errors import StaleWeightsError
from flexfloor.types import Response, ResponseRequest


class PromptGroups:
    """Collects the responses of one step, in whatever order they end.

    A group is handed out whole and once: with a part of it missing, what is computed from it would favour the
    short responses.
    """

    def __init__(self, requests: Sequence[ResponseRequest], weight_version: int) -> None:
        self._weight_version = weight_version
        self._names: dict[str, list[str]] = {}
        for request in requests:
            self._names.setdefault(request.prompt_id, []).append(request.response_id)
        self._finished: dict[str, dict[str, Response]] = {prompt_id: {} for prompt_id in self._names}

    def add(self, response: Response) -> tuple[Response, ...] | None:
        """The group that this response completes, in the order of the requests; None while some are missing.

        Raises ValueError for a response that is not of this step or came before, StaleWeightsError for one
        that other weights made.
        """
        name, prompt_id = response.response_id, response.prompt_id
        if name not in self._names.get(prompt_id, ()):
            raise ValueError(f"response {name} is not one of this step")
        finished = self._finished[prompt_id]
        if name in finished:
            raise ValueError(f"response {name} has finished before")
        if response.weight_version != self._weight_version:
            raise StaleWeightsError(
                f"response {name} comes from weight_version {response.weight_version}; the step runs on "
                f"{self._weight_version}"
            )
        finished[name] = response
        names = self._names[prompt_id]
        return tuple(finished[one] for one in names) if len(finished) == len(names) else None
