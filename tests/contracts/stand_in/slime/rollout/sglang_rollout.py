"""The default rollout: groups until there are enough, then an abort of the rest."""

import asyncio
import inspect

from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.http_utils import get, post
from slime.utils.misc import load_function
from slime.utils.types import Sample


class Tokenizer:
    def encode(self, text, add_special_tokens=False):
        assert not add_special_tokens
        return [ord(character) for character in text]


class GenerateState:
    """One for the process, as in slime."""

    _only = None

    def __new__(cls, args):
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only.tokenizer = Tokenizer()
            cls._only.sampling_params = {"max_new_tokens": args.rollout_max_response_len, "temperature": 1.0}
            cls._only.aborted = False
        return cls._only


async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    if not sample.tokens:
        sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt)
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    if args.use_rollout_routing_replay:
        payload["return_routed_experts"] = True
    meta_info = (output := await post(url, payload))["meta_info"]
    drawn = meta_info["output_token_logprobs"]
    sample.append_response_tokens(
        args, tokens=[one[1] for one in drawn], log_probs=[one[0] for one in drawn], meta_info=meta_info,
        text=output["text"],
    )  # fmt: skip
    return sample


async def generate_and_rm(args, sample, sampling_params, evaluation=False):
    function = load_function(args.custom_generate_function_path)
    takes = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    sample = await function(args, sample, sampling_params, **takes)
    if sample.status is not Sample.Status.ABORTED:
        sample.reward = 1.0
    return sample


async def _group(args, group, evaluation=False):
    params = GenerateState(args).sampling_params
    return await asyncio.gather(*[generate_and_rm(args, one, params.copy(), evaluation) for one in group])


async def _train(args, get_samples):
    state, pending, data = GenerateState(args), set(), []
    num_asked = 0
    while len(data) < args.rollout_batch_size:
        while num_asked < args.rollout_batch_size:
            groups = get_samples(args.over_sampling_batch_size)
            pending |= {asyncio.ensure_future(_group(args, group)) for group in groups}
            num_asked += len(groups)
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            if args.drop_group(group):
                num_asked -= 1
            elif len(data) < args.rollout_batch_size:
                data.append(group)
    state.aborted = True
    workers = await get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
    await abort_servers_until_idle([worker["url"] for worker in workers["workers"]])
    unfinished = await asyncio.gather(*pending)
    state.aborted = False
    return sorted(data, key=lambda group: group[0].index), unfinished


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        samples = asyncio.run(_group(args, args.eval_samples, evaluation=True))
        return RolloutFnEvalOutput(data={"set": {"samples": samples}})
    samples, unfinished = asyncio.run(_train(args, data_source.get_samples))
    if unfinished:
        data_source.add_samples(unfinished)
    return RolloutFnTrainOutput(samples=samples, metrics={"own": 1})
