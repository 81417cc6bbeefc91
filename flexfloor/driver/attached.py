"""Leaves in the run directory what the nodes of a job need to start this run's server and trainer."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from flexfloor.config import TrainConfig
from flexfloor.config.checks import require
from flexfloor.config.choices import MembershipMode
from flexfloor.driver.prepare import prepare_model
from flexfloor.driver.services import Services, private_socket_dir, trainer_spec
from flexfloor.node_plan import PLAN_NAME, NodePlan, encode_plan
from flexfloor.processes import ChildProcesses
from flexfloor.report.console import RunConsole
from flexfloor.rollout.server import server_argv
from flexfloor.training.keys import write_new_keys
from flexfloor.training.launch import encode_spec

SPEC_NAME = "trainer.json"


def prepare_nodes(config: TrainConfig) -> Path:
    """Prepare the model, write plan, spec and keys, and return the plan's path.

    Raises ConfigError where the config starts server or trainer itself, and what the warm-up of a tiny model
    raises.
    """
    cluster = config.cluster
    fix = "set cluster.server_url and cluster.trainer_endpoint to where the nodes will listen"
    for key, value in (
        ("cluster.server_url", cluster.server_url),
        ("cluster.trainer_endpoint", cluster.trainer_endpoint),
    ):
        require(value is not None, key, value, "flexfloor-train would start it by itself", fix)
    run_dir = Path(config.run_dir).absolute()
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    run_dir.chmod(0o700)
    if cluster.trainer_keys is not None:
        write_new_keys(Path(cluster.trainer_keys))
    model_path = _prepared_model(config).absolute()
    spec_path = run_dir / SPEC_NAME
    assert cluster.trainer_endpoint is not None, "required above"
    spec_path.write_bytes(encode_spec(trainer_spec(config, cluster.trainer_endpoint, model_path)))
    plan_path = run_dir / PLAN_NAME
    plan_path.write_bytes(encode_plan(_plan(config, model_path, spec_path)))
    # It holds the server's flags, which may be keys.
    plan_path.chmod(0o600)
    return plan_path


def _prepared_model(config: TrainConfig) -> Path:
    """A tiny model is warmed up here, by a trainer on this node."""
    alone = replace(config, cluster=replace(config.cluster, trainer_endpoint=None, trainer_keys=None))
    with ExitStack() as stack:
        children = stack.enter_context(ChildProcesses())
        services = Services(alone, children, stack.enter_context(private_socket_dir()))
        return prepare_model(alone, services, RunConsole(progress=config.logging.progress))


def _plan(config: TrainConfig, model_path: Path, spec_path: Path) -> NodePlan:
    url = config.cluster.server_url
    assert url is not None, "required above"
    address = urlsplit(url)
    is_elastic = config.membership.mode is MembershipMode.elastic
    folder, log = config.membership.folder, config.cluster.iteration_log
    argv = server_argv(
        config,
        host=address.hostname or "127.0.0.1",
        port=address.port or 30000,
        model_path=str(model_path),
        membership_folder=Path(folder).absolute() if is_elastic and folder else None,
        iteration_log_folder=None if log is None else Path(log).absolute(),
    )
    return NodePlan(
        server_argv=argv,
        server_ranks=config.rollout.ep_size,
        server_url=url,
        is_elastic=is_elastic,
        trainer_spec=str(spec_path),
        trainer_ranks=config.trainer.num_ranks,
        device=config.cluster.device.value,
    )
