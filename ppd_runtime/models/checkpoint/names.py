"""The library's names for the tensors of a model's files, which may name them otherwise."""

from collections.abc import Callable
from pathlib import Path

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ppd_runtime.models.checkpoint.config import model_config, skeleton_of, text_names_in


def names_in_model(folder: Path, num_layers: int) -> Callable[[str], str | None]:
    """A map from a file's tensor names to the model's; parts of a model's tensor have that tensor's name.

    Files saved from the base model alone have no `model.` before their names, and other programs and older versions
    have names of their own. The rules are the library's own: floats and packed weights open alike. A tensor of a
    wrapper's other parts has no name in the model.
    """
    skeleton = skeleton_of(model_config(folder), num_layers)
    transforms = get_model_conversion_mapping(skeleton)
    renamings, converters = (
        [one for one in transforms if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)
    )
    text_name = text_names_in(folder)
    prefix, known = skeleton.base_model_prefix, skeleton.state_dict()

    def name_in_model(name: str) -> str | None:
        if (of_text := text_name(name)) is None:
            return None
        name = of_text
        found, _ = rename_source_key(name, renamings, converters, prefix, known)
        if found not in known and name in known:
            return name
        return str(found)

    return name_in_model
