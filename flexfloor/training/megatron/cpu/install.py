"""Makes this process fit for Megatron-Core on a CPU."""

from flexfloor.training.megatron.cpu import fake_cuda, torchvision_ops


def install() -> None:
    """Call before the first import of megatron or mbridge: some of their modules read torch.cuda then."""
    torchvision_ops.define_missing()
    fake_cuda.install()
    from flexfloor.training.megatron.cpu import patches

    patches.install()
