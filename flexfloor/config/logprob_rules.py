"""Rules on logprobs that are computed while workers are away. PURE."""

from flexfloor.config.checks import require
from flexfloor.config.choices import ReleaseUse
from flexfloor.config.schema import TrainConfig


def check_logprobs(config: TrainConfig) -> None:
    """Refuse `release.use=logprobs` where the train step needs none."""
    if config.release.use is not ReleaseUse.logprobs:
        return
    algorithm = config.algorithm
    needs_old = algorithm.importance_cap is not None and algorithm.num_minibatches > 1
    problem = f"there is nothing to compute: algorithm.kl_coef={algorithm.kl_coef:g} needs no reference "
    problem += f"logprobs, and algorithm.num_minibatches={algorithm.num_minibatches} with "
    problem += f"algorithm.importance_cap={algorithm.importance_cap} no old ones"
    fix = "choose release=park, or train with a KL penalty or with several minibatches"
    require(needs_old or algorithm.kl_coef > 0, "release.use", config.release.use.value, problem, fix)
