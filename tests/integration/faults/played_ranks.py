"""Four ranks without SGLang: ours is real, and the model is a sum over experts that shows a wrong one.

Real: manager, links, runtime, recovery, gloo groups, host mirrors, transfers, a process per rank. Played:
SGLang's scheduler and model. A token is made of the one before it and of the weights of one expert of each of
two layers, summed over all ranks. So an expert that nobody serves, that two ranks serve, or that holds other
weights gives another token, and so does a token that is made twice. A recurrent model has a state of each
request too, a count of its passes, and a pass that it takes twice gives another token.
"""

import os
import sys
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "unit" / "sglang_patches" / "elastic"))

from elastic_fakes import Batch, FusedMoE, Model

from flexfloor.experts.placement import canonical
from sglang_patches.cpu.gloo import share_device
from sglang_patches.elastic import start
from sglang_patches.elastic.runtime import ElasticRuntime
from sglang_patches.plugin_config import PluginConfig

NUM_RANKS, NUM_EXPERTS = 4, 8
VERSION = "7"
PASS_S = 0.004
"""What a decode pass takes at least, so that a test can aim between two."""


def tokens_of(seed: int, length: int) -> list[int]:
    """What any group of ranks has to answer."""
    tokens = [seed]
    while len(tokens) <= length:
        expert = tokens[-1] % NUM_EXPERTS
        tokens.append(_next(tokens[-1], float((expert + 1) + (100 + expert + 1))))
    return tokens[1:]


def _next(token: int, mark: float) -> int:
    return (token * 31 + int(mark) * 7 + 11) % 10007


@dataclass(frozen=True, slots=True)
class Work:
    """A request for one rank."""

    name: str
    seed: int
    length: int


@dataclass(frozen=True, slots=True)
class Control:
    """A request for all ranks, by way of the first."""

    name: str
    new_version: str = ""
    """Not empty: a weight update."""


# In the rank's process.


class Coordinator:
    """SGLang's GroupCoordinator."""

    def __init__(self, ranks: list[int], backend: str, group_name: str) -> None:
        self.device = torch.device("cpu")
        self.ranks = ranks
        self.world_size, self.rank_in_group = len(ranks), ranks.index(dist.get_rank())
        self.unique_name = f"{group_name}:0"
        self.device_group = dist.new_group(ranks, backend=backend, group_desc=f"{group_name}:device")
        self.cpu_group = dist.new_group(ranks, backend="gloo", group_desc=f"{group_name}:cpu")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.device_group)


class Adapter:
    """SGLang's SchedulerDPAttnAdapter, with our hook around it."""

    def __init__(self, rank: "PlayedRank") -> None:
        self._rank = rank

    def prepare_mlp_sync_batch(self, batch: Any) -> Any:
        return self._rank.runtime.gather(lambda: self._gather(batch))

    def _gather(self, batch: Any) -> Any:
        runtime, group = self._rank.runtime, self._rank.scheduler.tp_group
        num_tokens = len(batch.works) if batch else 0
        own = torch.tensor([num_tokens, runtime.vote(num_tokens)])
        rows = [torch.zeros(2, dtype=torch.int64) for _ in range(group.world_size)]
        if group.world_size > 1:
            dist.all_gather(rows, own, group=group.cpu_group)
        else:
            rows = [own]
        runtime.read_votes([int(row[1]) for row in rows])
        if batch is None and max(int(row[0]) for row in rows) > 0:
            batch = Pass([], is_extend=False)
        if batch is not None:
            batch.global_num_tokens = [int(row[0]) for row in rows]
        return batch


class Pass:
    """SGLang's ScheduleBatch."""

    def __init__(self, works: list[list[Any]], *, is_extend: bool) -> None:
        self.works = works
        self.forward_mode = SimpleNamespace(is_idle=lambda: not works, is_extend=lambda: is_extend)
        self.global_num_tokens: list[int] = []


class PlayedRank:
    def __init__(
        self, rank: int, folder: Path, inbox: Connection, out: Connection, *, is_recurrent: bool
    ) -> None:
        self._rank, self._inbox, self._out = rank, inbox, out
        self._is_recurrent = is_recurrent
        self._running: list[list[Any]] = []
        """Of each: the request, its last token, how many it has, and the passes in its state."""
        self._serving = SimpleNamespace(weight_version=VERSION)
        self._parallel = SimpleNamespace(
            world_group=SimpleNamespace(local_rank=rank, device_group=dist.group.WORLD)
        )
        self._parallel.override_permanently = vars(self._parallel).update
        _stand_in(
            "sglang.srt.runtime_context",
            get_parallel=lambda: self._parallel,
            get_serving=lambda: self._serving,
        )
        _stand_in(
            "sglang.srt.managers.io_struct",
            PauseGenerationReqInput=SimpleNamespace,
            ContinueGenerationReqInput=SimpleNamespace,
        )
        self.scheduler: Any = self._made_scheduler(rank, inbox)
        config = PluginConfig(
            device="cpu",
            membership="elastic",
            folder=str(folder / "membership"),
            park_frees=("experts",),
            recovery="on",
            prepare_timeout_s=20.0,
            fault_folder=str(folder / "faults"),
        )
        self.runtime: ElasticRuntime = start._build(self.scheduler, config, canonical(NUM_EXPERTS, NUM_RANKS))

    def _made_scheduler(self, rank: int, inbox: Connection) -> Any:
        block = list(canonical(NUM_EXPERTS, NUM_RANKS).experts_on(rank))
        model = Model([expert for expert in block if expert is not None])
        self._layers = model.layers
        launched = Coordinator(list(range(NUM_RANKS)), "gloo", "launched")
        runner = SimpleNamespace(model=model, device="cpu")
        return SimpleNamespace(
            tp_group=launched,
            tp_cpu_group=launched.cpu_group,
            tp_size=NUM_RANKS,
            tp_worker=SimpleNamespace(model_runner=runner),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(mamba_d_state=1 if self._is_recurrent else None)
            ),
            pause_generation=self._retract,
            continue_generation=lambda _request: None,
            memory_saver_adapter=None,
            weight_updater=SimpleNamespace(tp_cpu_group=launched.cpu_group),
            request_receiver=SimpleNamespace(recv_from_tokenizer=inbox, recv_from_rpc=None),
            running_batch=Batch(),
            chunked_req=None,
            waiting_queue=[],
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            _deferred_input_requests=[],
            last_batch=None,
            result_queue=deque(),
            cur_batch_for_debug=None,
            dp_attn_adapter=Adapter(self),
        )

    def loop(self) -> None:
        while True:
            self.runtime.at_loop_top()
            pulled = []
            while self._inbox.poll():
                pulled.append(self._inbox.recv())
            for request in self.runtime.broadcast(self._broadcast, _split, pulled):
                if isinstance(request, Work):
                    self._running.append([request, request.seed, 0, 0])
                else:
                    self._control(request)
            self.scheduler.running_batch = Batch(len(self._running))
            is_extend = any(not row[2] for row in self._running)
            batch = Pass(self._running, is_extend=is_extend) if self._running else None
            batch = self.scheduler.dp_attn_adapter.prepare_mlp_sync_batch(batch)
            if batch is None:
                threading.Event().wait(PASS_S)
            else:
                tokens = self.runtime.forward(lambda: self._forward(batch), batch, lambda: [])  # noqa: B023
                if not self.runtime.is_discarded(tokens):
                    self._keep(tokens)

    def _retract(self, request: Any) -> None:
        """SGLang's pause: all requests are prefilled again, and so is their state."""
        assert request.mode == "retract"
        for row in self._running:
            row[3] = row[2]
        self._out.send(("prefilled again", "rank", self._rank))

    def _control(self, request: Control) -> None:
        if request.new_version:
            self.runtime.update_weights(lambda: self._update(request.new_version), begins=True, ends=True)
        self._out.send(("control", request.name, -1))

    def _update(self, version: str) -> Any:
        """The same numbers under another version: what is asked here is which mirror is taken."""
        dist.barrier(group=self.scheduler.tp_group.cpu_group)
        self._serving.weight_version = version
        return SimpleNamespace(success=True)

    def _broadcast(self, requests: list[Any]) -> list[Any]:
        work, control = _split(requests)
        group = self.scheduler.tp_group
        box = [control if group.rank_in_group == 0 else None]
        if group.world_size > 1:
            dist.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)
        return [*work, *(box[0] or [])]

    def _forward(self, batch: Any) -> list[int]:
        for row in batch.works:
            row[3] += 1
        threading.Event().wait(PASS_S)
        group, total = self.scheduler.tp_group, sum(batch.global_num_tokens)
        first = sum(batch.global_num_tokens[: group.rank_in_group])
        tokens = torch.zeros(total, dtype=torch.int64)
        tokens[first : first + len(batch.works)] = torch.tensor(
            [row[1] for row in batch.works], dtype=torch.int64
        )
        if group.world_size > 1:
            dist.all_reduce(tokens, group=group.device_group)
        marks = torch.zeros(total)
        for layer in self._layers:
            slots = layer.dispatcher.local_expert_mapping[tokens % NUM_EXPERTS]
            # Through the held tensors, as a kernel would: what lies in the slot is what counts.
            own = [float(layer.w13_weight[slot].mean()) if slot >= 0 else 0.0 for slot in slots.tolist()]
            marks += torch.tensor(own)
        if group.world_size > 1:
            dist.all_reduce(marks, group=group.device_group)
        own_marks = marks[first : first + len(batch.works)].tolist()
        twice = [row[3] - row[2] - 1 if self._is_recurrent else 0 for row in batch.works]
        rows = zip(batch.works, own_marks, twice, strict=True)
        return [_next(row[1], mark) + passes for row, mark, passes in rows]

    def _keep(self, tokens: list[int]) -> None:
        for row, token in zip(self._running, tokens, strict=True):
            row[1], row[2] = token, row[2] + 1
            self._out.send((row[0].name, "token", token))
        self._running[:] = [row for row in self._running if row[2] < row[0].length]
        self.scheduler.running_batch = Batch(len(self._running))


def _split(requests: list[Any]) -> tuple[list[Any], list[Any]]:
    return [r for r in requests if isinstance(r, Work)], [r for r in requests if isinstance(r, Control)]


def _stand_in(name: str, **attributes: Any) -> None:
    """In a process of its own, so nothing is put back."""
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def run_rank(
    rank: int, folder: Path, inbox: Connection, out: Connection, log_path: Path, is_recurrent: bool
) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    share_device()
    store = dist.FileStore(str(folder / "world"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)

    def make(ranks: list[list[int]], _local: int, backend: str, *, group_name: str) -> Coordinator:
        return Coordinator(ranks[0], backend, group_name)

    made = SimpleNamespace(init_model_parallel_group=make)
    _stand_in("sglang.srt.distributed.parallel_state", init_model_parallel_group=make)
    _stand_in("sglang.srt.distributed", parallel_state=made)
    _stand_in("sglang.srt.layers.moe.fused_moe_triton.layer", FusedMoE=FusedMoE)
    _stand_in("sglang.srt.plugins.hook_registry", HookRegistry=SimpleNamespace(_patched={}))
    PlayedRank(rank, folder, inbox, out, is_recurrent=is_recurrent).loop()
