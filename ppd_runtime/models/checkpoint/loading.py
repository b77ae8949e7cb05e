"""Loads a model, by its description, with only the layers asked for."""

import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ppd_runtime.models.checkpoint.config import (
    AGAIN,
    drop_layers,
    first_layers_config,
    layer_number,
    model_config,
    model_type,
    skeleton_of,
    text_names_in,
    weight_files,
)
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.checkpoint.names import names_in_model
from ppd_runtime.models.checkpoint.quantised import packed_tensors
from ppd_runtime.models.checkpoint.weight_cache import kept_copies, map_tensors
from ppd_runtime.models.checkpoint.wrappers import text_tensor
from ppd_runtime.models.native.experts import choose_few_bits_experts
from ppd_runtime.models.native.few_bits_attention import choose_few_bits_attention
from ppd_runtime.models.native.linear import QuantisedLinear, take_packed
from ppd_runtime.models.stage.decoder_parts import decoder_in, embedding_in, embedding_name, final_norm
from ppd_runtime.models.stage.library_probe import embedding_scale
from ppd_runtime.models.stage.slicing import decoder_of
from ppd_runtime.models.stage.wide import INPUT_MODULES

logger = logging.getLogger(__name__)
_HEAD = "lm_head.weight"
_CONVERSION = "automatic conversion of the weights"
"""In the library's RuntimeError for tensors that it cannot put together; its own report is not shown."""


def load_layers(
    info: ModelInfo, last: int, dtype: torch.dtype, device: str, first: int = 0, head_tokens: Sequence[int] = ()
) -> PreTrainedModel:
    """A causal language model with the embedding, layers 1 to `last` of the original, the final norm and the head.

    The first `first` layers are placeholders without memory, so that all layers keep their numbers. With `first`, the
    embedding has no memory either, unless the head shares it. With `head_tokens` the head has only these tokens' rows
    and logits.

    Only these tensors are read, by mapping files into memory. On CPUs, another dtype than the files' is mapped from a
    kept copy, which all processes of a host share. With `last` below the model's depth this is what a sub-process
    needs: its first layers, and norm and head for the exit.
    """
    whole = model_config(info.folder)
    config = first_layers_config(whole, last)
    packed = packed_tensors(info, last) if info.weights else {}
    tensors = _read_tensors(info, last, dtype if device == "cpu" and not packed else None, first, packed)
    absent = [*range(first), *range(last, config.num_hidden_layers)]
    if absent or packed:
        tensors |= _placeholders(config, absent, dtype, packed)
    model = _of_tensors(info, config, tensors, dtype)
    _keep_rotary_tables(model, whole)
    if packed:
        take_packed(model, packed)
        choose_few_bits_attention(model)
        if any(weight.dim() > 1 for weight in packed.values()):
            choose_few_bits_experts(model)
    if head_tokens:
        model.lm_head = some_rows(model.lm_head, head_tokens)
    model = _moved(drop_layers(model, last), device, first).eval()
    _check_cuts(info, model)
    return model


def load_layer(info: ModelInfo, number: int, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """A decoder without weights but for its last layer, the model's `number`-th, counted from 0; on the CPU.

    A layer behind the model's last one is as that one is. `tensors` are its weights, by the names of the model's files.
    """
    config = first_layers_config(model_config(info.folder), number + 1)
    others = _placeholders(config, range(-1, number), dtype, ())
    decoder: nn.Module = decoder_in(_of_tensors(info, config, others | dict(tensors), dtype))
    return decoder


def _of_tensors(
    info: ModelInfo, config: PretrainedConfig, tensors: dict[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The library's model of these tensors; ValueError where one is missing or has another shape."""
    with no_progress_bar(), errors_only(), _names_the_model(info):
        model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=tensors | _zero_experts(config, tensors),
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for complaint, names in (
        ("lack", sorted(report["missing_keys"])),
        ("have another shape than config.json says for", sorted(key for key, *_ in report["mismatched_keys"])),
    ):
        if names:
            found = f"{names[0]} ({len(names)} tensors in all)"
            raise ValueError(f"model {info.name!r}: its files {complaint} {found}; {AGAIN}")
    return model


@contextlib.contextmanager
def _names_the_model(info: ModelInfo) -> Iterator[None]:
    """Have the library's complaint about tensors that it stacks, such as experts, be a ValueError of one line."""
    try:
        yield
    except RuntimeError as error:
        if _CONVERSION not in str(error):
            raise
        found = "have tensors that cannot be stacked, such as experts of different shapes"
        raise ValueError(f"model {info.name!r}: its files {found}; {AGAIN}") from error


def _zero_experts(config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Placeholders for experts that give their input back: the library's model has matrices for them, which no pass
    reads, and files may have none."""
    numbers = range(getattr(config, "zero_expert_num", None) or 0)
    return {
        other: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in tensors.items()
        if ".experts.0." in name and "down_proj" not in name
        for number in numbers
        if (other := name.replace(".experts.0.", f".experts.{config.n_routed_experts + number}.")) not in tensors
    }


def check_gpu_memory(info: ModelInfo, first: int, last: int, dtype: torch.dtype, device: str) -> None:
    """Raise ValueError if a GPU has too little free memory for the weights that `load_layers` would put there."""
    if not device.startswith("cuda"):
        return
    needed = weight_bytes(info, first, last, dtype)
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    if needed > free:
        raise ValueError(
            f"device={device!r}: layers {first + 1} to {last} of {info.name!r} in {str(dtype).removeprefix('torch.')} "
            f"need {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free: choose more stages, or free it"
        )


def weight_bytes(info: ModelInfo, first: int, last: int, dtype: torch.dtype, head_tokens: int = 0) -> int:
    """Bytes of the weights that `load_layers` puts on a device; `head_tokens` is the head's rows, 0 for all."""
    skeleton = skeleton_of(model_config(info.folder), last, dtype)
    shares = skeleton.config.tie_word_embeddings and not head_tokens
    decoder = decoder_in(skeleton)
    names = _only_for_the_first_layer(decoder, shares) if first else []
    absent = {id(decoder.get_submodule(name).weight) for name in names}
    head = skeleton.lm_head.weight
    return head_tokens * head.shape[1] * head.element_size() + sum(
        weight.nbytes
        for name, weight in skeleton.named_parameters()
        if id(weight) not in absent and not 0 <= layer_number(name) < first and not (head_tokens and name == _HEAD)
    )


def _keep_rotary_tables(model: PreTrainedModel, whole: PretrainedConfig) -> None:
    """Keep the rotary tables of all kinds of layers; the library makes those of the kinds it finds.

    Code that is compiled for a layer takes them all, whatever layers its stage has.
    """
    kinds = [set(getattr(config, "layer_types", None) or ()) for config in (model.config, whole)]
    decoder = decoder_in(model)
    if kinds[0] != kinds[1] and getattr(decoder, "rotary_emb", None) is not None:
        decoder.rotary_emb = type(decoder.rotary_emb)(whole)


@torch.no_grad()
def some_rows(head: nn.Linear | QuantisedLinear, tokens: Sequence[int]) -> nn.Module:
    """A head for these tokens alone, which shares no memory with the whole one."""
    if isinstance(head, QuantisedLinear):
        return head.rows(tokens)
    short = nn.Linear(head.in_features, len(tokens), head.bias is not None, dtype=head.weight.dtype)
    for name, weights in head.named_parameters():
        setattr(short, name, nn.Parameter(weights[list(tokens)], requires_grad=False))
    return short


def _placeholders(
    config: PretrainedConfig, layers: Container[int], dtype: torch.dtype, packed: Container[str]
) -> dict[str, Tensor]:
    """Placeholder tensors of absent layers and packed matrices, by name: each is one number, expanded."""
    names = skeleton_of(config, config.num_hidden_layers, dtype).state_dict().items()
    tied = {_HEAD} if config.tie_word_embeddings else set()  # it has the embedding's until the packed one is there
    return {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in names
        if layer_number(name) in layers or (name in packed and name not in tied)
    }


def _moved(model: PreTrainedModel, device: str, first: int) -> PreTrainedModel:
    """The model on a device, its first layers and what only the first one reads without memory."""
    decoder = decoder_in(model)
    names = _only_for_the_first_layer(decoder, _shares_embedding(model)) if first else []
    absent = {name: decoder.get_submodule(name) for name in [*(f"layers.{i}" for i in range(first)), *names]}
    for name in absent:
        _put(decoder, name, nn.Identity())
    model = model.to(device)
    for name, module in absent.items():
        kept = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
        for tensor in (
            *module.parameters(),
            *module.buffers(),
        ):  # what no file has is for the bit probe
            like = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
            tensor.data = like if id(tensor) in kept else tensor.data.to(device)
        _put(decoder, name, module)
    return model


def _put(decoder: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(decoder.get_submodule(parent), attribute, module)


def _only_for_the_first_layer(decoder: nn.Module, head_shares_embedding: bool) -> list[str]:
    """The decoder's parts that no stage without its first layer needs."""
    embedding = [] if head_shares_embedding else [embedding_name(decoder)]
    return [*embedding, *(name for name in INPUT_MODULES if hasattr(decoder, name))]


def _shares_embedding(model: PreTrainedModel) -> bool:
    """Whether the head's weights are the embedding's."""
    return bool(model.lm_head.weight.data_ptr() == embedding_in(model).weight.data_ptr())


def new_model(info: ModelInfo, seed: int, device: str) -> PreTrainedModel:
    """A model of the same shape with freshly drawn weights, in float32."""
    config = model_config(info.folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    model = model.to(device).eval()
    _check_cuts(info, model)
    return model


def weight_copies(info: ModelInfo, dtype: torch.dtype) -> dict[Path, Path]:
    """Copies in `dtype` of the files with another dtype, by file."""
    may_round = partial(_rounds_everything, info, dtype)
    return kept_copies(weight_files(info.folder), dtype, partial(_in_order, info), may_round=may_round)


def _rounds_everything(info: ModelInfo, dtype: torch.dtype) -> bool:
    """Whether the library loads each of the model's tensors in `dtype`; some architectures keep a few in float32."""
    skeleton = skeleton_of(model_config(info.folder), info.num_layers, dtype)
    return all(t.dtype == dtype for t in skeleton.state_dict().values() if t.is_floating_point())


def bfloat16_copies(info: ModelInfo) -> dict[Path, Path]:
    """Copies of the files in bfloat16, in the order in which compiled code reads them."""
    return kept_copies(weight_files(info.folder), torch.bfloat16, partial(_in_order, info), tiled=True)


def bfloat16_weights(info: ModelInfo, last: int) -> dict[str, Tensor]:
    """The first layers' tensors in bfloat16, shared by all processes, with matrices as by `in_tiles`; empty without
    kept copies."""
    copies, name_in_model = bfloat16_copies(info), names_in_model(info.folder, info.num_layers)
    wanted = _wanted(name_in_model, 0, last)
    tensors = [pair for path, copy in copies.items() for pair in _some_tensors(path, copy, wanted)]
    return {name_in_model(name) or name: tensor for name, tensor in tensors if tensor.dtype == torch.bfloat16}


def _check_cuts(info: ModelInfo, model: PreTrainedModel) -> None:
    """Refuse a decoder whose pass does more than embed, run layers and norm: a cut would lose or repeat that."""
    probe = torch.linspace(-1, 1, model.config.hidden_size, device=model.device, dtype=model.dtype).view(1, 1, -1)
    bare = decoder_of(model, {}, embedding_scale(model))
    name = final_norm(bare)
    norm = getattr(decoder_in(model), name)
    setattr(bare, name, norm)
    with torch.inference_mode():
        normed = bare(inputs_embeds=probe, use_cache=False).last_hidden_state
        if not torch.equal(normed, norm(probe)):
            raise ValueError(f"model {info.name!r} does more than run layers and a final norm, so it cannot be cut")


def _read_tensors(
    info: ModelInfo, last: int, dtype: torch.dtype | None, first: int = 0, packed: Container[str] = ()
) -> dict[str, Tensor]:
    """The unpacked tensors of layers `first` to `last`, in `dtype` if copies are kept, else as they are stored."""
    tensors = dict[str, Tensor]()
    copies, name_in_model = weight_copies(info, dtype) if dtype else {}, names_in_model(info.folder, info.num_layers)
    wanted = _wanted(name_in_model, first, last, packed)
    text_name, kind, size = text_names_in(info.folder), model_type(info.folder), model_config(info.folder).hidden_size
    for path in weight_files(info.folder):
        try:
            found = _some_tensors(path, copies.get(path), wanted)
            tensors |= {text_name(name) or name: text_tensor(kind, name, tensor, size) for name, tensor in found}
        except (SafetensorError, OSError) as error:
            reason = f"{path.name} cannot be read: {one_line(error)}"
            raise ValueError(f"model {info.name!r}: {reason}; {AGAIN}") from error
    return tensors


def _in_order(info: ModelInfo, names: Iterable[str]) -> list[str]:
    """A file's tensors in the order in which a pass reads them; unread ones come last."""
    of_model = info.folder, info.num_layers
    name_in_model, model = names_in_model(*of_model), skeleton_of(model_config(info.folder), info.num_layers)
    places = {name: place for place, name in enumerate(model.state_dict())}
    return sorted(names, key=lambda name: places.get(name_in_model(name) or "", len(places)))


def _wanted(
    name_in_model: Callable[[str], str | None], first: int, last: int, packed: Container[str] = ()
) -> Callable[[str], bool]:
    """Tells by a tensor's name in a file whether it is unpacked and in these layers or in none."""

    def is_wanted(name: str) -> bool:
        if (found := name_in_model(name)) is None:
            return False
        number = layer_number(found)
        return number < last and not 0 <= number < first and found not in packed

    return is_wanted


def _some_tensors(path: Path, copy: Path | None, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """A file's wanted tensors by their names there, mapped into memory: from the copy if there is one."""
    if copy:
        try:
            mapped = dict(map_tensors(copy))
        except (OSError, ValueError) as error:
            logger.warning("reading %s itself, for its copy cannot be: %s", path, one_line(error))
        else:
            yield from ((name, tensor) for name, tensor in mapped.items() if is_wanted(name))
            return
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            if is_wanted(name):
                yield name, file.get_tensor(name)


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Silence transformers' warnings, such as its table of missing tensors: `load_layers` says that in one line."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide the k + 1 bars of stages, which load fast; the caller's setting is restored afterwards."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
