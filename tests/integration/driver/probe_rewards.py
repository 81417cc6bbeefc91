"""A reward that any model can vary in, so that the weights change in every step."""

from flexfloor.types import Prompt


def share_of_digits(prompt: Prompt, response_text: str) -> float:
    """Share of characters that are digits; 0 for an empty response."""
    return sum(character.isdigit() for character in response_text) / max(1, len(response_text))
