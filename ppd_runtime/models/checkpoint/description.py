"""What has to be known about a model before its weights are read."""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppd_runtime.models.checkpoint.architecture import architecture_of, depth_of_all_kinds
from ppd_runtime.models.checkpoint.config import (
    AGAIN,
    checked_config,
    eos_token_ids_of,
    model_config,
    read_json,
    skeleton_of,
    text_names_in,
    weight_files,
)
from ppd_runtime.models.checkpoint.dequantised.folder import check_scheme, folder_as_stored, folder_of_floats
from ppd_runtime.models.checkpoint.gguf.kept import is_gguf, is_kept, kept_folder
from ppd_runtime.models.checkpoint.hub import fetched_with, find_model, one_line
from ppd_runtime.models.checkpoint.packages import packaged_file
from ppd_runtime.models.checkpoint.quantisable import check_quantisable
from ppd_runtime.models.checkpoint.weights_card import agreed_format, card_of
from ppd_runtime.models.stage.library_probe import has_states, kept_by_layers
from ppd_runtime.models.stage.paired import attends_twice
from ppd_runtime.models.stage.rotary import most_positions
from ppd_runtime.models.stage.slicing import check_sub_layers
from ppd_runtime.models.stage.wide import is_wide
from ppd_runtime.settings.checks import check_choice
from ppd_runtime.settings.config import ALL_FORMATS, FLOATS, STORED

logger = logging.getLogger(__name__)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PROCESSOR_TEMPLATE = "chat_template.json"
"""Where older models that read pictures have their template."""
_WHOLE_NUMBERS = {"BOOL", *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64))}
"""Names in safetensors of dtypes that are not floats."""


@dataclass(frozen=True)
class ModelInfo:
    """What has to be known about a model before its weights are read."""

    name: str
    """The name as given; a hub's model has its commit, `name@commit`."""
    folder: Path
    num_layers: int
    vocab_size: int
    max_positions: int | None
    """See `most_positions`."""
    eos_token_ids: frozenset[int]
    recomputed_at: int | None = None
    """Tokens of a text at which transformers' `generate` drops its cache and reads the text again; None: never."""
    longest_in_chunks: int | None = None
    """The longest prompt that is read in chunks, in tokens; None: any."""
    weights: str | None = None
    """The matrices' weight format, such as int8; None: floats, as in its files."""

    @property
    def weights_name(self) -> str:
        """The format's name in reports and messages."""
        return self.weights or FLOATS


def read_info(fields: Mapping[str, Any]) -> ModelInfo:
    """A model's description, from its JSON fields."""
    eos_token_ids = frozenset(fields["eos_token_ids"])
    return ModelInfo(**{**fields, "folder": Path(fields["folder"]), "eos_token_ids": eos_token_ids})


def describe(model: str, weights: str | None = None, needs_weights: bool = True) -> ModelInfo:
    """Find a model and check that it can be run here, without reading its weights.

    Args:
        model: a local folder, a GGUF file, a hub name, one with a revision (`name@commit`), "demo", or "smollm2".
        weights: the wanted format of the matrices' weights; None: as in its files.
        needs_weights: False if its shape and tokenizer are enough.

    Raises:
        ValueError: no such model, no safetensors weights, an architecture that cannot be cut into stages, or weights
            that cannot have the format, or have another one.
    """
    if weights is not None:
        check_choice("weights", weights, ALL_FORMATS)
    file = packaged_file(model)
    name, folder = (model, kept_folder(str(file or model))) if file or is_gguf(model) else find_model(model)
    card = card_of(folder)
    weights = agreed_format(model, weights, card)
    config = checked_config(model, folder)
    scheme = check_scheme(model, folder)
    has_floats = needs_weights and not (file or is_gguf(model) or card)
    layers, whole_numbers = _look_into_files(folder) if has_floats else (0, None)
    said = getattr(config, "num_hidden_layers", 0)
    if 0 < layers < said:  # before so many are built
        raise ValueError(f"model {model!r}: config.json has {said} layers, its files {layers}; {AGAIN}")
    if layers > said + (getattr(config, "num_nextn_predict_layers", None) or 0) and said:
        logger.warning("%s: config.json has %d layers, its files %d: those behind are not read", model, said, layers)
    found = architecture_of(model, config)
    if needs_weights:
        _check_weights(model, name, folder)
    if weights == STORED and not (scheme or card):
        raise ValueError(f"weights={weights!r}: no other program has quantised model {model!r}; leave weights out")
    if weights:
        check_quantisable(model, weights, found.skeleton)
    if scheme and needs_weights:
        folder = (folder_as_stored if weights == STORED else folder_of_floats)(model, folder, scheme)
        config = model_config(folder)
    elif whole_numbers:
        raise ValueError(f"model {model!r}: {whole_numbers}, which is no format of floats; {AGAIN}")
    return ModelInfo(
        name=name,
        folder=folder,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_positions=most_positions(config),
        recomputed_at=found.recomputed_at,
        longest_in_chunks=found.longest_in_chunks,
        eos_token_ids=eos_token_ids_of(folder, config),
        weights=weights,
    )


def _check_weights(model: str, name: str, folder: Path) -> None:
    """Raise ValueError if a model's weight files are missing."""
    if not (files := weight_files(folder)):
        raise ValueError(f"model {model!r}: {folder} holds no safetensors weights; convert or download them first")
    if missing := [path.name for path in files if not path.is_file()]:
        way_out = AGAIN if Path(model) == folder else fetched_with(name)
        found = f"{folder} lacks {missing[0]} ({len(missing)} of {len(files)} files of weights)"
        raise ValueError(f"model {model!r}: {found}; {way_out}")


def _look_into_files(folder: Path) -> tuple[int, str | None]:
    """The number of layers in the weight files, and a weight stored as whole numbers, if there is one."""
    layers, found, text_name = 0, None, text_names_in(folder)
    for path in weight_files(folder):
        with contextlib.suppress(SafetensorError, OSError), safe_open(path, "pt") as file:  # loading reports it
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if (of_text := text_name(name)) is None:
                    continue
                if number := _LAYER.search(of_text):
                    layers = max(layers, 1 + int(number[1]))
                if name.endswith(".weight") and (stored := file.get_slice(name).get_dtype()) in _WHOLE_NUMBERS:
                    found = found or f"{path.name} stores {name} as {stored}"
    return layers, found


def load_tokenizer(info: ModelInfo) -> PreTrainedTokenizerBase:
    """The model's tokenizer; raises ValueError if the folder has none."""
    try:
        # For a kept folder the library would choose by architecture, whatever the file says.
        kind = PreTrainedTokenizerFast if is_kept(info.folder) else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(info.folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain ones
        raise ValueError(f"model {info.name!r}: no usable tokenizer in {info.folder}: {one_line(error)}") from error
    tokenizer.clean_up_tokenization_spaces = False  # a space that was streamed cannot be taken back
    if tokenizer.chat_template is None and (of_processor := info.folder / _PROCESSOR_TEMPLATE).is_file():
        tokenizer.chat_template = read_json(of_processor).get("chat_template")
    return tokenizer


def check_leaving_out(info: ModelInfo, user: str, least_layers: int = 1) -> None:
    """Raise ValueError if the model's attentions and MLPs cannot be left out for `user`, or it has too few layers;
    reads no weights."""
    config = model_config(info.folder)
    with _refusing(info, user, config.model_type):
        if info.num_layers < least_layers:
            raise ValueError(f"it has too few layers, {info.num_layers}, at least {least_layers} are needed")
        _check_entries_alone(config)
        check_sub_layers(skeleton_of(config, depth_of_all_kinds(config, kept_by_layers(config))))


def check_entries_alone(info: ModelInfo, user: str) -> None:
    """Raise ValueError if a layer of the model keeps a recurrent state, has two attentions, or reads more than a hidden
    state, which `user` cannot run; reads no weights."""
    config = model_config(info.folder)
    with _refusing(info, user, config.model_type):
        _check_entries_alone(config)
    check_hidden_states(info, user)


def check_hidden_states(info: ModelInfo, user: str) -> None:
    """Raise ValueError if states are wide, which `user` cannot read; reads no weights."""
    config = model_config(info.folder)
    with _refusing(info, user, config.model_type):
        if is_wide(config):
            raise ValueError("its layers read more of a token than a hidden state")


def _check_entries_alone(config: PretrainedConfig) -> None:
    if has_states(config):
        raise ValueError("its layers keep a recurrent state")
    if attends_twice(config):
        raise ValueError("its layers have two attentions each")


@contextlib.contextmanager
def _refusing(info: ModelInfo, user: str, kind: str) -> Iterator[None]:
    """What a check within raises says who cannot run which model."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{user} cannot run model {info.name!r} ({kind}): {error}; choose another method or model"
        ) from error
