"""What a loaded model's parts take, and how much memory a device of this machine has."""

import torch
from torch import nn

from ppd_runtime.cost_model.memory import Memory
from ppd_runtime.host import memory_bytes
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.models.stage.stage import Stage


def measured_memory(ordinary: OrdinaryDecoding) -> Memory:
    """Of the model as it is loaded; of a GPU all that it has, of CPU cores the host's memory, which they share."""
    stage, model = ordinary.stage, ordinary.stage.model
    table, head = model.model.embed_tokens, model.lm_head
    on_cpu = stage.device.type == "cpu"
    return Memory(
        layer=max(_bytes(layer) for layer in model.model.layers),
        head=_bytes(head) + _bytes(model.model.norm),
        embedding=_bytes(table),
        entry=_entry_bytes(stage),
        device=memory_bytes() if on_cpu else torch.cuda.get_device_properties(stage.device).total_memory,
        tied=head.weight.data_ptr() == table.weight.data_ptr(),
        shared=on_cpu,
    )


def _bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def _entry_bytes(stage: Stage) -> int:
    """One token's keys and values in a layer, by a pass over one token."""
    stage.begin(1)
    stage.run(0, 1, [0], 0)
    entries = stage.export_entries(0, 1, 1)
    return entries.numel() * entries.element_size()
