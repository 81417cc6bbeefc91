"""Rules that look at this machine: files, permissions, installed packages. They read, and start nothing.

Packages are looked up and never imported: the driver must not load torch or SGLang to refuse a config.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from flexfloor.config.checks import require
from flexfloor.config.hf_checkpoint import check_hf_checkpoint
from flexfloor.config.reward_function import check_reward_function
from flexfloor.config.schema import ClusterConfig, Device, ModelConfig, ModelSource, TrainConfig
from flexfloor.errors import ConfigError

_GPU_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def check_machine(config: TrainConfig) -> None:
    _check_writable("run_dir", config.run_dir)
    _check_model(config.model)
    _check_data_path(config.data.path)
    check_reward_function(config.data.reward)
    _check_wandb(config.logging.wandb_project)
    _check_device(config.cluster)
    _check_engines(config.cluster)


def _check_model(model: ModelConfig) -> None:
    if model.source is ModelSource.hf:
        check_hf_checkpoint(model)
    elif model.path is not None:
        _check_writable("model.path", model.path)


def _check_data_path(path: str | None) -> None:
    holds = path is None or Path(path).expanduser().exists()
    require(holds, "data.path", path, "there is no such file or folder", "set data.path to existing data")


def _check_wandb(project: str | None) -> None:
    fix = "pip install 'flexfloor[wandb]', or set logging.wandb_project=null"
    holds = project is None or find_spec("wandb") is not None
    require(holds, "logging.wandb_project", project, "the package wandb is not installed", fix)


def _check_device(cluster: ClusterConfig) -> None:
    starts_here = cluster.server_url is None or cluster.trainer_endpoint is None
    missing = cluster.device is Device.cuda and not any(file.exists() for file in _GPU_DRIVER_FILES)
    fix = "set cluster=local_cpu, or attach with cluster.server_url and cluster.trainer_endpoint"
    problem = "this machine has no NVIDIA driver"
    require(not (starts_here and missing), "cluster.device", cluster.device.value, problem, fix)


def _check_engines(cluster: ClusterConfig) -> None:
    fix = "run scripts/setup.sh, or attach to one that runs elsewhere"
    holds = cluster.server_url is not None or find_spec("sglang") is not None
    require(holds, "cluster.server_url", None, "SGLang is not installed, so no server can start here", fix)
    holds = cluster.trainer_endpoint is not None or find_spec("megatron") is not None
    problem = "Megatron-Core is not installed, so no trainer can start here"
    require(holds, "cluster.trainer_endpoint", None, problem, fix)


def _check_writable(key: str, folder: str) -> None:
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise ConfigError(key, folder, f"{existing} is not a folder", f"set {key} to another folder")
    is_writable = os.access(existing, os.W_OK | os.X_OK)
    require(is_writable, key, folder, f"{existing} is not writable", f"set {key} to a folder of yours")
