"""TRL's client as a trainer's program: it generates, sends a model's weights twice, and prints what it got as JSON.

    python -m tests.system.trl_trainer URL GROUP_PORT MODEL PROMPT LENGTH

The client is TRL's own. It wants vLLM for one thing, the transport of tensors over NCCL, and vLLM needs a torch of its
own: gloo stands in for NCCL here, with the same rendezvous and the same packing of tensors.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

# A version whose client says at the rendezvous that it packs tensors.
VERSION = "0.30.0"
# As in vLLM.
PACKED_BYTES = 1 << 30
NAME = "weight_transfer"
TIMEOUT = timedelta(seconds=60)


class Group:
    """What TRL closes: it drops the store and the socket of a communicator's group."""

    store: Any = None
    socket: Any = None


class Communicator:
    """The trainer's end of a group, as rank 0."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.group = Group()
        size = int(info["world_size"])
        meeting = rendezvous(f"tcp://{info['master_address']}:{info['master_port']}", 0, size, timeout=TIMEOUT)
        store, _, _ = next(iter(meeting))
        name = c10d.GroupName(NAME)
        kept = c10d.PrefixStore(NAME, store)
        made, _ = c10d._new_process_group_helper(
            size, 0, [], distributed.Backend("gloo"), kept, group_name=name, timeout=TIMEOUT
        )
        c10d._world.pg_group_ranks[made] = {i: i for i in range(size)}
        self._made = made

    def broadcast(self, tensor: Tensor) -> None:
        distributed.broadcast(tensor, group_src=0, group=self._made)


def send_packed(
    iterator: Iterator[tuple[str, Tensor]],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    """Send tensors as bytes, as many at a time as it takes to exceed PACKED_BYTES."""
    assert src == 0
    packed: list[Tensor] = []
    for item in iterator:
        packed.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(len(part) for part in packed) > PACKED_BYTES:
            group.broadcast(torch.cat(packed))
            packed = []
    if packed:
        group.broadcast(torch.cat(packed))


def stand_in() -> None:
    """Put modules into the places of those of vLLM that TRL's client imports."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": VERSION},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": Communicator},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": send_packed},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module


def main() -> None:
    url, port, model, prompt, length = sys.argv[1:]
    # Before the stand-in: with vLLM in the same process TRL would import more of it.
    importlib.import_module("trl.generation")
    stand_in()
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    client = importlib.import_module("trl.generation.vllm_client").VLLMClient(base_url=url, group_port=int(port))

    def generate() -> dict[str, Any]:
        found: dict[str, Any] = client.generate(
            [json.loads(prompt)], temperature=0.0, max_tokens=int(length), generation_kwargs={"ignore_eos": True}
        )
        return found

    found = [generate()]
    # TRL compares only the kind of the device.
    client.init_communicator(device="cuda")
    trained = auto.from_pretrained(model, dtype=torch.float32)
    client.update_model_params(trained)
    client.reset_prefix_cache()
    found.append(generate())
    # Parameters one by one, as with sharded trainers: here with the first layer's norm zeroed.
    with torch.no_grad():
        trained.model.layers[0].input_layernorm.weight.zero_()
    with client.weight_update():
        for name, parameter in trained.named_parameters():
            client.update_named_param(name, parameter.data)
    found.append(generate())
    client.close_communicator()
    print(json.dumps(found), flush=True)
    # Gloo's threads would wait for the server's end of the group.
    os._exit(0)


if __name__ == "__main__":
    main()
