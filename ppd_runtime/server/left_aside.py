"""What clients also send, and what makes no difference here: hints, and values that ask for nothing."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ppd_runtime.server.body import Body

_OF_OPENAI: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
    "logprobs": (False,),
    "best_of": (1,),
    "logit_bias": ({},),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_OF_VLLM: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_strs": (False,),
    "echo": (False,),
    "guided_json": ({},),
    "extra_body": ({},),
    "detokenize": (True,),
    "continue_final_message": (False,),
}
_OF_LLAMA_CPP: Mapping[str, tuple[Any, ...]] = {
    "n_predict": (-1,),
    "id_slot": (-1,),
    "n_probs": (0,),
    "reasoning_format": ("none", "auto"),
    "typ_p": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "repeat_penalty": (1,),
    "repeat_last_n": (64,),
    "dynatemp_range": (0,),
    "dynatemp_exponent": (1,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
    "dry_multiplier": (0,),
    "dry_base": (1.75,),
    "dry_allowed_length": (2,),
    "dry_penalty_last_n": (-1,),
    "mirostat": (0,),
    "backend_sampling": (False,),
}
ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {**_OF_OPENAI, **_OF_VLLM, **_OF_LLAMA_CPP}
"""Defaults of other servers' clients, with which a field counts as absent."""


class Hints(Body):
    """Fields that change no text: they are taken, whatever they hold, and left aside."""

    asks_for_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = ASKS_FOR_NOTHING

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    priority: Any = None
    """A field of vLLM's."""
    cache_prompt: Any = None
    """llama.cpp's, as are those below."""
    timings_per_token: Any = None
    return_progress: Any = None
