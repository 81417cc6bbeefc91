"""What elastic membership does not support yet, by SGLang flag. PURE.

Each entry leaves the list with a test that shows static and elastic runs give the same tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SWITCHES = {
    "--enable-lora": "adapters are not moved with their experts",
    "--lora-paths": "adapters are not moved with their experts",
    "--enable-hierarchical-cache": "the host cache keeps groups of its own",
    "--enable-hicache": "the host cache keeps groups of its own",
    "--enable-hisparse": "its coordinator keeps groups of its own",
    "--enable-two-batch-overlap": "both halves of a batch would have to agree on a switch",
    "--enable-single-batch-overlap": "it overlaps with collectives of a group that may change",
    "--enable-prefill-delayer": "it gathers over the group that it was started with",
    "--enable-eplb": "SGLang's load balancer would move experts as well",
    "--enable-pdmux": "it makes a second TP group",
    "--enable-dp-attention-local-control-broadcast": "control calls must reach all ranks in one iteration",
    "--enable-return-routed-experts": "the capturer is sized for the experts at the start",
    "--enable-paged-experts": "SGLang's pager would move experts as well",
    "--enable-elastic-expert-backup": "it belongs to SGLang's own elastic EP",
    "--enable-symm-mem": "symmetric memory belongs to one communicator",
    "--enable-pd-role-switch": "ranks would leave their event loop",
    "--enable-kv-cache-sharding": "KV of a rank that left would be missing",
    "--quantization": "scales of quantised experts have not been moved in a test",
    "--speculative-algorithm": "there are two gathers in an iteration, and a draft model",
    "--elastic-ep-backend": "it is SGLang's own elastic EP",
    "--cpu-offload-gb": "offloaded experts are not in the tensors that move",
    "--kt-weight-path": "KTransformers keeps experts outside the model",
    "--grpc-mode": "the manager lives in the HTTP server's process",
    "--smg-grpc-mode": "the manager lives in the HTTP server's process",
    "--use-ray": "ranks are not children of the server",
    "--encoder-only": "there are no ranks to release",
}
"""Flags that may not be given at all."""

ONLY = {
    "--pp-size": ("1", "a pipeline stage would lose a rank"),
    "--pipeline-parallel-size": ("1", "a pipeline stage would lose a rank"),
    "--attn-cp-size": ("1", "a worker would be several ranks"),
    "--attention-context-parallel-size": ("1", "a worker would be several ranks"),
    "--moe-dp-size": ("1", "the EP group would not be the TP group"),
    "--moe-data-parallel-size": ("1", "the EP group would not be the TP group"),
    "--dcp-size": ("1", "a worker would be several ranks"),
    "--decode-context-parallel-size": ("1", "a worker would be several ranks"),
    "--dwdp-size": ("1", "ranks make no gather to vote in"),
    "--tokenizer-worker-num": ("1", "the manager lives in the one tokenizer process"),
    "--disaggregation-mode": ("null", "prefill and decode queues are not drained"),
    "--moe-a2a-backend": ("none", "such a backend takes contiguous physical expert ids"),
    "--ep-num-redundant-experts": ("0", "replicas are not placed by FlexFloor"),
    "--load-balance-method": (
        "auto round_robin total_requests total_tokens minimum_tokens",
        "the policy has not been tried with ranks that leave",
    ),
}
"""Flags that may be given with these values only."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One flag that elastic membership refuses."""

    flag: str
    value: str
    reason: str


def unsupported(flags: Sequence[str]) -> Iterator[Unsupported]:
    """All flags of an SGLang command line that elastic membership cannot be combined with."""
    for index, flag in enumerate(flags):
        name, is_joined, joined = flag.partition("=")
        following = "".join(flags[index + 1 : index + 2])
        value = joined if is_joined else "" if following.startswith("--") else following
        if name in SWITCHES:
            yield Unsupported(name, value or "on", SWITCHES[name])
        elif name in ONLY and value not in ONLY[name][0].split():
            yield Unsupported(name, value, ONLY[name][1])
