"""What the library calls the tensors of a model's files, in which they may have other names."""

from collections.abc import Callable

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ppd_runtime.models.checkpoint.config import model_config, skeleton_of
from ppd_runtime.models.checkpoint.description import ModelInfo


def names_in_model(info: ModelInfo) -> Callable[[str], str]:
    """Gives the name that a file's tensor has in the model, of one that is a part of a tensor there that tensor's.

    Files saved from the base model alone have no `model.` before their names, and other programs and older versions
    have names of their own. These are the library's own rules, by which it loads such files: floats and packed weights
    open alike.
    """
    skeleton = skeleton_of(model_config(info.folder), info.num_layers)
    transforms = get_model_conversion_mapping(skeleton)
    renamings, converters = (
        [one for one in transforms if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)
    )
    prefix, known = skeleton.base_model_prefix, skeleton.state_dict()

    def name_in_model(name: str) -> str:
        found, _ = rename_source_key(name, renamings, converters, prefix, known)
        if found not in known and name in known:
            return name
        return str(found)

    return name_in_model
