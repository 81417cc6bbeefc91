"""Puts the elastic runtime into a scheduler process, once SGLang's scheduler is complete."""

import os
import secrets
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flexfloor.experts.placement import ExpertPlacement, canonical
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.messages import HelloMsg
from flexfloor.membership.process_watch import this_node
from sglang_patches import CONFIG_ENV, plugin_config
from sglang_patches.elastic import group_store
from sglang_patches.elastic.delays import Delays
from sglang_patches.elastic.expert_slots import ExpertLayers, create_reserved
from sglang_patches.elastic.graphs import GraphSets
from sglang_patches.elastic.groups import GroupFactory
from sglang_patches.elastic.parking import ParkedMemory
from sglang_patches.elastic.prepare import Preparer
from sglang_patches.elastic.prepared_sets import prepare_sets
from sglang_patches.elastic.runtime import ElasticRuntime
from sglang_patches.elastic.topology import check_experts, check_graphs, check_topology, num_experts_of
from sglang_patches.elastic.transfer import TransferGroup
from sglang_patches.member_sets import without_full
from sglang_patches.plugin_config import PluginConfig

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
    model = scheduler.tp_worker.model_runner.model
    folder = Path(config.folder)
    endpoint = group_store.agreed_endpoint(scheduler.tp_group, folder)
    store = group_store.connect(endpoint, folder, config.prepare_timeout_s)
    groups = GroupFactory(store, timeout_s=config.prepare_timeout_s)
    full = tuple(range(num_ranks))
    groups.keep(full, scheduler.tp_group)
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
        TransferGroup(groups, num_ranks, torch.device(scheduler.tp_group.device)),
        experts,
        resume_memory=memory.resume,
        weight_version=_weight_version,
        moves_dense=memory.loses_dense,
        delay=Delays(config.delays, ep_rank, "prepare").at,
    )
    link = AgentLink(endpoint.for_peer(), _hello(ep_rank))
    link.start()
    delays = Delays(config.delays, ep_rank, "loop")
    return ElasticRuntime(scheduler, ep_rank, link, preparer, experts, memory, placement, delays, graphs)


def _weight_version() -> object:
    from sglang.srt.runtime_context import get_serving

    return get_serving().weight_version


def _hello(ep_rank: int) -> HelloMsg:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HelloMsg(
        ep_rank=ep_rank,
        incarnation=secrets.randbits(62),
        pid=os.getpid(),
        node=this_node(),
        weight_version=str(_weight_version()),
        flexfloor_version=version("flexfloor"),
        sglang_version=version("sglang"),
        patches=sorted(HookRegistry._patched),
    )
