"""What a rollout step refuses before it sends anything: requests and ledgers that do not belong together."""

from collections.abc import Sequence

from flexfloor.errors import LedgerError, StaleWeightsError
from flexfloor.rollout.ledger import Ledger
from flexfloor.types import ResponseRequest


def refuse_twins(requests: Sequence[ResponseRequest]) -> None:
    """Raises ValueError where two requests have one response_id."""
    names = {request.response_id for request in requests}
    if len(names) != len(requests):
        raise ValueError(f"{len(requests)} requests, but only {len(names)} different response_ids")


def check_ledger(ledger: Ledger, weight_version: int) -> None:
    """Raises StaleWeightsError for a ledger of other weights."""
    opened = ledger.state.opened
    assert opened is not None, "Ledger.open writes it"
    if opened.weight_version != weight_version:
        raise StaleWeightsError(
            f"{ledger.path} is of weight_version {opened.weight_version}; this step runs on {weight_version}"
        )


def refuse_strangers(ledger: Ledger, requests: Sequence[ResponseRequest]) -> None:
    """An older ledger may be of the same step and yet of another data order or run seed: LedgerError."""
    wanted = {request.response_id: request for request in requests}
    for name, known in ledger.state.responses.items():
        request = wanted.get(name)
        if request is None or (request.prompt_token_ids, request.sampling_seed) != (
            known.first.prompt_token_ids,
            known.first.sampling_seed,
        ):
            raise LedgerError(
                f"{ledger.path}: response {name} is not one of this step, or has another prompt or seed; was "
                "the run started with another seed or dataset? Use a new run directory"
            )
