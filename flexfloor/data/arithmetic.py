"""The quickstart's task: a modulo b by repeated subtraction, with every intermediate value written out.

    prompt "97%7:"   response "90,83,76,69,62,55,48,41,34,27,20,13,6."

The reward is 1 only for the whole exact chain: rewarding the remainder alone is gamed within twenty steps by
responses that skip the chain. a is log-uniform and b uniform, which gives the long-tailed response lengths
that the scheduler is there for (with a up to 99: median 11 tokens, longest 143).
"""

import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexfloor.data.records import content_id
from flexfloor.errors import DataError
from flexfloor.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SOURCE = "arithmetic"
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK)
# The task needs the first fourteen; the rest fills the vocabulary to 32, which 2, 4 and 8 shards divide.
CHARACTERS = "0123456789%:,.+-*/=()abcdefg"
TOKEN_IDS = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
MIN_DIVIDEND, MAX_DIVIDEND = 5, 99
MIN_DIVISOR, MAX_DIVISOR = 2, 9


def chain(dividend: int, divisor: int) -> list[int]:
    """Values after each subtraction, down to the remainder; `[dividend]` where nothing can be taken away."""
    values = list(range(dividend - divisor, -1, -divisor))
    return values or [dividend]


def reference_response(dividend: int, divisor: int) -> str:
    """The only response that scores 1."""
    return _rendered(chain(dividend, divisor))


def score(prompt: Prompt, response_text: str) -> float:
    """1.0 iff the response is the whole exact chain, end mark included; nothing is stripped."""
    return 1.0 if response_text == prompt.answer else 0.0


def arithmetic_prompts(num_prompts: int, *, seed: int, max_dividend: int = MAX_DIVIDEND) -> list[Prompt]:
    """`num_prompts` distinct prompts in the order they were drawn; DataError if there are not that many."""
    num_distinct = (max_dividend - MIN_DIVIDEND + 1) * (MAX_DIVISOR - MIN_DIVISOR + 1)
    if not 1 <= num_prompts <= num_distinct:
        raise DataError(
            f"source=arithmetic: num_prompts={num_prompts} of the {max(num_distinct, 0)} prompts that "
            f"max_dividend={max_dividend} gives. Fix: lower num_prompts or raise max_dividend"
        )
    pairs: dict[tuple[int, int], None] = {}
    for pair in _pairs(random.Random(f"arithmetic-prompts/{seed}"), max_dividend):
        pairs[pair] = None
        if len(pairs) == num_prompts:
            break
    return [_prompt(*pair) for pair in pairs]


def demonstrations(
    num: int, *, seed: int, corrupt_share: float = 0.08, max_dividend: int = MAX_DIVIDEND
) -> list[tuple[list[int], list[int]]]:
    """`num` pairs (prompt token ids, response token ids incl. <eos>) for a supervised warm-up.

    Each step of a chain is wrong with probability `corrupt_share`: off by one or two and continued from
    there, or the chain ends early. That is on purpose: it leaves something for reinforcement learning to
    remove.
    """
    if not 0.0 <= corrupt_share <= 1.0:
        raise ValueError(f"corrupt_share={corrupt_share}: not a share. Fix: set it between 0 and 1")
    rng = random.Random(f"arithmetic-demonstrations/{seed}")
    pairs = _pairs(rng, max_dividend)
    return [_demonstration(rng, *next(pairs), corrupt_share) for _ in range(num)]


def encode(text: str) -> list[int]:
    """Token ids of a text, as the tokenizer gives them; KeyError for a character outside of it."""
    return [TOKEN_IDS[character] for character in text]


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Character tokenizer, 32 entries; adds no special token, and decoding gives back the exact string."""
    # Imported here: reward workers load this module and need no tokenizer.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocab=TOKEN_IDS, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        # The default "cleans up" spaces around punctuation, which would change what was sampled.
        clean_up_tokenization_spaces=False,
    )


def _pairs(rng: random.Random, max_dividend: int) -> Iterator[tuple[int, int]]:
    low, high = math.log(MIN_DIVIDEND), math.log(max_dividend + 1)
    while True:
        # min: exp(log(n + 1)) may round up to n + 1.
        dividend = min(int(math.exp(rng.uniform(low, high))), max_dividend)
        yield max(dividend, MIN_DIVIDEND), rng.randint(MIN_DIVISOR, MAX_DIVISOR)


def _prompt(dividend: int, divisor: int) -> Prompt:
    text, answer = f"{dividend}%{divisor}:", reference_response(dividend, divisor)
    return Prompt(prompt_id=content_id(text, answer), text=text, messages=None, answer=answer, source=SOURCE)


def _demonstration(
    rng: random.Random, dividend: int, divisor: int, corrupt_share: float
) -> tuple[list[int], list[int]]:
    response = _rendered(_corrupted_chain(rng, dividend, divisor, corrupt_share))
    return encode(f"{dividend}%{divisor}:"), [*encode(response), TOKEN_IDS[EOS]]


def _corrupted_chain(rng: random.Random, dividend: int, divisor: int, corrupt_share: float) -> list[int]:
    values: list[int] = []
    value = dividend
    while not values or value >= divisor:
        value -= divisor if value >= divisor else 0
        if rng.random() < corrupt_share:
            # Ending early is a mistake only while something can still be taken away.
            if value >= divisor and rng.random() < 0.5:
                return [*values, value]
            # abs: a step below zero turns into one above, so that the value always changes or stays positive.
            value = abs(value + rng.choice((-2, -1, 1, 2)))
        values.append(value)
    return values


def _rendered(values: list[int]) -> str:
    return ",".join(map(str, values)) + "."
