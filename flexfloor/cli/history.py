"""`flexfloor-history`: put the lengths of earlier rollouts into a history, and show what it holds.

Exit codes: 0 done; 2 the user's mistake or a file that cannot be used, in one line.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from os.path import commonpath
from pathlib import Path

from flexfloor.data.length_dumps import READERS, DumpedResponse, DumpOptions, read_dump, user_text
from flexfloor.data.sources import load_prompts
from flexfloor.errors import DataError
from flexfloor.report.console import RunConsole
from flexfloor.scheduling.history import DatasetCounts, HistoryError, LengthHistory
from flexfloor.scheduling.observation import LengthObservation
from flexfloor.scheduling.predict import Predictor

REFUSED = 2
COLUMNS = ("dataset", "responses", "prompts", "passes", "capped", "mean", "share", "rank")
_SOURCES = {".jsonl": "jsonl", ".parquet": "parquet"}


def main() -> int:
    arguments = _parser().parse_args()
    try:
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except (DataError, HistoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED


def pass_by_step(steps: Mapping[int, set[str]]) -> dict[int, int]:
    """Which pass each step belongs to; `steps` has the prompts of each.

    A dump does not say. A step most of whose prompts came already in this pass begins the next one.
    """
    passes, current, seen = {}, 0, set[str]()
    for step in sorted(steps):
        if 2 * len(steps[step] & seen) > len(steps[step]):
            current, seen = current + 1, set()
        seen |= steps[step]
        passes[step] = current
    return passes


def to_observations(
    responses: Sequence[DumpedResponse], dataset: str, run_id: str
) -> Iterator[LengthObservation]:
    """Responses of one run, by step; response ids count the responses of a prompt in a step."""
    ordered = sorted(responses, key=lambda one: (one.rollout_step, one.prompt_id))
    prompts: dict[int, set[str]] = {}
    for one in ordered:
        prompts.setdefault(one.rollout_step, set()).add(one.prompt_id)
    passes = pass_by_step(prompts)
    # Where no cap is known, none cut off a response: the longest of all is as good as any.
    longest = max((one.num_tokens for one in ordered), default=0)
    for (step, prompt_id), group in groupby(ordered, key=lambda one: (one.rollout_step, one.prompt_id)):
        for index, one in enumerate(group):
            yield LengthObservation(
                dataset=dataset,
                prompt_id=prompt_id,
                response_id=f"{step}/{prompt_id}/{index}",
                run_id=run_id,
                rollout_step=step,
                weight_version=step,
                pass_index=passes[step],
                num_tokens=one.num_tokens,
                prompt_tokens=one.prompt_tokens,
                is_truncated=one.is_truncated,
                cap_tokens=max(1, one.num_tokens, longest if one.cap_tokens is None else one.cap_tokens),
            )


def _import(arguments: argparse.Namespace) -> int:
    options = DumpOptions(
        cap_tokens=arguments.cap_tokens,
        count_tokens=_token_counter(arguments),
        id_field=arguments.id_field,
        prompt_ids=_prompt_ids(arguments.prompts) if arguments.prompts else None,
    )
    responses = list(read_dump(arguments.format, arguments.paths, options))
    if not responses:
        raise DataError(f"{arguments.paths[0]}: no finished response in it. Fix: name another dump")
    run_id = arguments.run or _run_id(arguments.format, arguments.paths)
    observations = list(to_observations(responses, arguments.dataset, run_id))
    with LengthHistory.open(arguments.history) as history:
        num_new = history.add(observations)
    prompts = {one.prompt_id for one in observations}
    say = RunConsole(progress=False).say
    say(f"{len(observations)} responses of {len(prompts)} prompts as {run_id}, {num_new} of them new")
    if options.prompt_ids is not None:
        known = len(prompts & set(options.prompt_ids.values()))
        say(f"{known} of these prompts are in {arguments.prompts}")
    if arguments.chars_per_token:
        say(f"lengths are estimates at {arguments.chars_per_token:g} characters a token")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with LengthHistory.open(arguments.history, must_exist=True) as history:
        counts = history.counts()
        rows = [_cells(one, history.read(one.dataset)) for one in counts]
    console = RunConsole(progress=False)
    if not rows:
        console.say(f"{arguments.history}: empty")
        return 0
    console.table(f"{arguments.history}", COLUMNS, rows)
    console.say("mean: tokens of a response; capped: share of responses that the cap ended")
    console.say("share: of the variance of ln(length), what lies between prompts")
    console.say("rank: correlation of predicted and realised lengths of prompts, over the last steps")
    return 0


def _cells(counts: DatasetCounts, observations: Sequence[LengthObservation]) -> Sequence[str]:
    predictor = Predictor.from_history(observations, cap_tokens=max(one.cap_tokens for one in observations))
    spread = predictor.variances
    correlation = predictor.rank_correlation
    return (
        counts.dataset,
        str(counts.num_responses),
        str(counts.num_prompts),
        str(counts.num_passes),
        f"{counts.num_truncated / counts.num_responses:.1%}",
        f"{counts.mean_tokens:.0f}",
        f"{spread.between / (spread.between + spread.passes + spread.within):.0%}",
        "-" if correlation is None else f"{correlation:.2f}",
    )


def _run_id(format_name: str, paths: Sequence[Path]) -> str:
    """The same for the same dump, so that importing it again, grown or not, keeps each response once."""
    folders = [str(path.resolve() if path.is_dir() else path.resolve().parent) for path in paths]
    return f"{format_name}:{commonpath(folders)}"


def _token_counter(arguments: argparse.Namespace) -> Callable[[str], int] | None:
    if arguments.chars_per_token is not None:
        per_token: float = arguments.chars_per_token
        return lambda text: round(len(text) / per_token)
    if arguments.tokenizer is None:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    except (OSError, ValueError) as error:
        problem = next(iter(str(error).splitlines()), "no tokenizer in it")
        raise DataError(
            f"--tokenizer {arguments.tokenizer}: {problem}. Fix: name the model's folder"
        ) from error
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _prompt_ids(path: Path) -> dict[str, str]:
    prompts = load_prompts(_SOURCES.get(path.suffix, "hf_disk"), path=path)
    texts = {}
    for prompt in prompts:
        users = [m["content"] for m in prompt.messages or () if m["role"] == "user"]
        text = prompt.text if prompt.text is not None else (users[-1] if users else "")
        texts[user_text(text)] = prompt.prompt_id
    return texts


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return convert


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexfloor-history", description="Lengths of responses that predictions are made from."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="what a history holds, by dataset")
    show.add_argument("history", type=Path, metavar="FILE")
    show.set_defaults(command=_show)
    add = commands.add_parser("import", help="take in a rollout dump; may be repeated")
    add.add_argument("--format", choices=sorted(READERS), required=True)
    add.add_argument("--dataset", required=True, help="name that the run will use; ids count within it")
    add.add_argument("--history", type=Path, required=True, metavar="FILE", help="made if need be")
    add.add_argument("--cap-tokens", type=_positive(int), help="response cap of that run; verl needs it")
    counting = add.add_mutually_exclusive_group()
    counting.add_argument("--tokenizer", metavar="MODEL", help="counts tokens of a dump of texts (verl)")
    counting.add_argument("--chars-per-token", type=_positive(float), help="estimates them instead")
    naming = add.add_mutually_exclusive_group()
    naming.add_argument("--id-field", metavar="NAME", help="key that holds the prompt's id")
    naming.add_argument("--prompts", type=Path, metavar="DATASET", help="dataset whose prompt ids to use")
    add.add_argument("--run", metavar="NAME", help="run the dump is of; default: its format and folder")
    add.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files or folders of the dump")
    add.set_defaults(command=_import)
    return parser


if __name__ == "__main__":
    sys.exit(main())
