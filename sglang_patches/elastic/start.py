"""Puts the elastic runtime into a scheduler process, once SGLang's scheduler is complete."""

import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flexfloor.experts.placement import ExpertPlacement, canonical
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.messages import HelloMsg
from flexfloor.membership.process_watch import this_node
from sglang_patches import CONFIG_ENV, plugin_config
from sglang_patches.elastic import group_store
from sglang_patches.elastic.controls import ControlLog
from sglang_patches.elastic.delays import Delays
from sglang_patches.elastic.expert_slots import ExpertLayers, create_reserved
from sglang_patches.elastic.fault_points import FaultPoints
from sglang_patches.elastic.graphs import GraphSets
from sglang_patches.elastic.groups import GroupFactory, gather_objects, restamp
from sglang_patches.elastic.mirror import ExpertMirrors
from sglang_patches.elastic.parking import ParkedMemory
from sglang_patches.elastic.prefill_again import PrefillAgain
from sglang_patches.elastic.prepare import Preparer
from sglang_patches.elastic.prepared_sets import prepare_sets
from sglang_patches.elastic.recovery import Recovery
from sglang_patches.elastic.runtime import ElasticRuntime, weight_version
from sglang_patches.elastic.topology import (
    check_experts,
    check_graphs,
    check_topology,
    no_recovery,
    num_experts_of,
    unsafe_repeat,
)
from sglang_patches.elastic.transfer import TransferGroup
from sglang_patches.member_sets import without_full
from sglang_patches.plugin import refuse
from sglang_patches.plugin_config import PluginConfig

logger = logging.getLogger(__name__)

_current: ElasticRuntime | None = None


def current() -> ElasticRuntime | None:
    """The runtime of this process; None before the scheduler is complete, and in every other process."""
    return _current


def start(scheduler: Any) -> None:
    """Make the runtime. Collective: every rank does it at the end of its scheduler's constructor."""
    global _current
    config = plugin_config.read(os.environ[CONFIG_ENV])
    num_experts = num_experts_of(scheduler.model_config.hf_text_config)
    check_topology(scheduler, num_experts, config.floor)
    check_experts(scheduler, config.num_reserved_slots(num_experts))
    check_graphs(scheduler, config.expert_slots)
    placement = canonical(num_experts, scheduler.tp_group.world_size)
    _current = _build(scheduler, config, placement)


def create_experts(create: Callable[[int], None], layer: Any, num_own: int) -> None:
    """Make a MoE layer's weights, with reserved expert slots where the configuration asks for them."""
    config = plugin_config.read(os.environ[CONFIG_ENV])
    num_slots = config.num_reserved_slots(layer.moe_runner_config.num_experts)
    if num_slots:
        create_reserved(create, layer, num_own, num_slots)
    else:
        create(num_own)


def _build(scheduler: Any, config: PluginConfig, placement: ExpertPlacement) -> ElasticRuntime:
    ep_rank, num_ranks = scheduler.tp_group.rank_in_group, scheduler.tp_group.world_size
    model, device = scheduler.tp_worker.model_runner.model, torch.device(scheduler.tp_group.device)
    recovers, faults = _recovers(scheduler, config), FaultPoints(config.fault_folder, ep_rank)
    groups = _groups(scheduler, config, own_full_group=recovers)
    full = tuple(range(num_ranks))
    experts = ExpertLayers(
        model,
        placement.experts_on(ep_rank),
        placement.num_experts,
        num_reserved_slots=config.num_reserved_slots(placement.num_experts),
    )
    memory = ParkedMemory(scheduler, experts, config.park_frees)
    graphs = GraphSets(scheduler.tp_worker.model_runner, full)
    prepare_sets(scheduler, ep_rank, without_full(config.member_sets, num_ranks), groups, graphs)
    preparer = Preparer(
        ep_rank,
        model,
        groups,
        TransferGroup(groups, full, device),
        experts,
        resume_memory=memory.resume,
        weight_version=weight_version,
        moves_dense=memory.loses_dense,
        delay=_both(Delays(config.delays, ep_rank, "prepare").at, faults.at),
    )
    controls = ControlLog()
    mirrors = None
    if recovers:
        mirrors = ExpertMirrors(
            experts, ep_rank, placement.block(ep_rank), partial(gather_objects, scheduler.tp_group)
        )
    link = AgentLink(
        Endpoint.read(Path(config.folder)).for_peer(), _hello(ep_rank), on_break=lambda *_: groups.break_all()
    )
    recovery = None
    if mirrors is not None:
        recovery = Recovery(
            scheduler,
            ep_rank,
            link,
            groups,
            preparer,
            experts,
            memory,
            mirrors,
            controls,
            faults,
            device=device,
            timeout_s=config.prepare_timeout_s,
        )
        recovery.weights_changed(weight_version())
    link.start()
    delays = Delays(config.delays, ep_rank, "loop")
    return ElasticRuntime(
        scheduler,
        ep_rank,
        link,
        preparer,
        experts,
        memory,
        placement,
        delays,
        graphs,
        controls,
        recovery,
        faults,
        PrefillAgain(scheduler) if recovers and not _repeats(scheduler, config) else None,
    )


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    def call(point: str) -> None:
        first(point)
        second(point)

    return call


def _groups(scheduler: Any, config: PluginConfig, *, own_full_group: bool) -> GroupFactory:
    folder = Path(config.folder)
    endpoint = group_store.agreed_endpoint(scheduler.tp_group, folder)
    connect = partial(group_store.connect, endpoint, folder, config.prepare_timeout_s)
    groups = GroupFactory(connect, timeout_s=config.prepare_timeout_s)
    full = tuple(range(scheduler.tp_group.world_size))
    if own_full_group:
        # The connections of the one that SGLang made are not known, so it could not be broken.
        restamp(scheduler, groups.coordinator(full, 0))
    else:
        groups.keep(full, scheduler.tp_group)
    return groups


def _recovers(scheduler: Any, config: PluginConfig) -> bool:
    problem = no_recovery(config.device)
    if problem and config.recovery == "on":
        refuse(
            f"--flexfloor-recovery=on: {problem}. Fix: leave the flag out; a lost rank ends the server then"
        )
    return config.recovers and not problem


def _repeats(scheduler: Any, config: PluginConfig) -> bool:
    problem = unsafe_repeat(scheduler.model_config)
    if problem:
        logger.warning("flexfloor: requests are prefilled again after a loss: %s", problem)
    return not problem and config.retry == "auto"


def _hello(ep_rank: int) -> HelloMsg:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HelloMsg(
        ep_rank=ep_rank,
        incarnation=secrets.randbits(62),
        pid=os.getpid(),
        node=this_node(),
        weight_version=weight_version(),
        flexfloor_version=version("flexfloor"),
        sglang_version=version("sglang"),
        patches=sorted(HookRegistry._patched),
    )
