"""Rules on scheduling across groups. PURE."""

from flexfloor.config.checks import require
from flexfloor.config.choices import Batching, ClockName, Device, LossAgg, MembershipMode, StartingSize
from flexfloor.config.schema import TrainConfig


def check_scheduling(config: TrainConfig) -> None:
    """Refuse a scheduling that would bias training or cannot act; ConfigError names the key and the fix."""
    scheduling = config.scheduling
    is_bucketed = scheduling.batching is Batching.length_bucketed
    require(
        not is_bucketed or config.algorithm.loss_agg is not LossAgg.token_mean,
        "algorithm.loss_agg",
        "token_mean",
        "with scheduling.batching=length_bucketed a token of a step of long responses would weigh less than "
        "one of a step of short responses",
        "set algorithm.loss_agg=sequence_mean or fixed, or scheduling.batching=fifo",
    )
    require(
        scheduling.starting_size is StartingSize.full or config.membership.mode is MembershipMode.elastic,
        "scheduling.starting_size",
        "auto",
        "a static group always has all of its ranks",
        "set scheduling.starting_size=full, or choose membership=elastic",
    )
    is_scaled = scheduling.model_tokens_per_token > 1
    require(
        not is_scaled or config.cluster.device is Device.cpu,
        "scheduling.model_tokens_per_token",
        scheduling.model_tokens_per_token,
        f"stands for a larger model on a CPU, and cluster.device={config.cluster.device}",
        "set scheduling.model_tokens_per_token=1",
    )
    is_modelled = scheduling.clock not in (ClockName.auto, ClockName.neutral)
    require(
        not is_scaled or is_modelled,
        "scheduling.model_tokens_per_token",
        scheduling.model_tokens_per_token,
        f"has no meaning under scheduling.clock={scheduling.clock}",
        "set scheduling.clock=h200 or another GPU, or leave it at 1",
    )
