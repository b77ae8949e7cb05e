"""Transformers' own ways of drafting and verifying, timed from outside: `assistant_early_exit` and prompt lookup.

Runs greedy `generate` with a streamer, which gets the tokens of each verification, and a hook on the model's passes,
which sees what is verified and when.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ppd_runtime.checks import check_share, check_whole
from ppd_runtime.methods.early_exit import check_exit_layer
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.loading import errors_only, no_progress_bar
from ppd_runtime.sampling_params import FROM_THE_MODEL, SamplingParams
from ppd_runtime.tune.comparison.figures import Drafting, TextRun

Arguments = dict[str, Any]
"""What `generate` is called with."""


class TransformersFailedError(RuntimeError):
    """Transformers cannot decode this model so, whatever the reason."""


def early_exit_arguments(
    info: ModelInfo,
    exit_layer: int | None = None,
    num_assistant_tokens: int = 20,
    assistant_confidence_threshold: float = 0.4,
) -> Arguments:
    """`generate`'s arguments for drafts after a layer; the defaults are transformers', the layer is LayerSkip's."""
    check_whole("num_assistant_tokens", num_assistant_tokens, 1)
    check_share("assistant_confidence_threshold", assistant_confidence_threshold)
    return {
        "assistant_early_exit": check_exit_layer(exit_layer, info),
        "num_assistant_tokens": num_assistant_tokens,
        "assistant_confidence_threshold": assistant_confidence_threshold,
    }


def prompt_lookup_arguments(
    info: ModelInfo, prompt_lookup_num_tokens: int = 10, max_matching_ngram_size: int = 2
) -> Arguments:
    """`generate`'s arguments for drafts out of the text so far; the numbers are transformers' documentation's."""
    check_whole("prompt_lookup_num_tokens", prompt_lookup_num_tokens, 1)
    check_whole("max_matching_ngram_size", max_matching_ngram_size, 1)
    return {
        "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        "max_matching_ngram_size": max_matching_ngram_size,
    }


def _checked(method: str, arguments: Callable[..., Arguments]) -> Callable[[Mapping[str, Any], ModelInfo], Arguments]:
    known = list(inspect.signature(arguments).parameters)[1:]

    def check(settings: Mapping[str, Any], info: ModelInfo) -> Arguments:
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ValueError(f"{method} has no setting {unknown[0]!r}: it has {', '.join(known)}")
        return arguments(info, **settings)

    return check


TRANSFORMERS_METHODS: Mapping[str, Callable[[Mapping[str, Any], ModelInfo], Arguments]] = {
    "assistant_early_exit": _checked("assistant_early_exit", early_exit_arguments),
    "prompt_lookup": _checked("prompt_lookup", prompt_lookup_arguments),
}
"""(settings, model) → `generate`'s arguments; ValueError for settings that cannot work."""


def load_whole(info: ModelInfo, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model in transformers."""
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(info.folder, dtype=getattr(torch, dtype), trust_remote_code=False)
    return model.to(device).eval()


class TransformersMethod:
    """Greedy `generate` with arguments of `TRANSFORMERS_METHODS`; a model may serve several."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, arguments: Arguments) -> None:
        self._model, self._depth, self._arguments = model, info.num_layers, arguments
        self._eos_token_ids = sorted(info.eos_token_ids) or None

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], TextRun]:
        """The new tokens, and what they took.

        Raises:
            TransformersFailedError: saying why it cannot.
        """
        watch = _Watch(self._model, self._depth)
        try:
            output = self._generate(prompt_ids, params, watch)
        except Exception as error:  # the library raises all kinds
            reason = " ".join(str(error).split())[:200]
            raise TransformersFailedError(f"{type(error).__name__}: {reason}") from error
        finally:
            self._model.config.num_hidden_layers = self._depth  # an early exit that fails leaves its own
        return tuple(output[0, len(prompt_ids) :].tolist()), watch.run()

    def _generate(self, prompt_ids: Sequence[int], params: SamplingParams, watch: "_Watch") -> Tensor:
        # Drafting settings come from the model's own configuration, generation settings from the call's.
        eos = None if params.ignore_eos else self._eos_token_ids
        shared = {"eos_token_id": eos, "pad_token_id": 0, **_changes_of_scores(params)}
        own = {name: value for name, value in self._arguments.items() if name.startswith(("num_", "assistant_conf"))}
        self._model.generation_config = GenerationConfig(**shared, **own)
        config = GenerationConfig(
            max_new_tokens=params.max_new_tokens, do_sample=False, use_cache=True, **shared, **self._arguments
        )
        inputs = torch.tensor([list(prompt_ids)], device=self._model.device)
        with errors_only(), watch:
            return self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), generation_config=config, streamer=watch
            )


def _changes_of_scores(params: SamplingParams) -> Arguments:
    """What changes greedy choices, by `generate`'s names."""
    said = {name: getattr(params, name) for name in FROM_THE_MODEL if name not in ("top_k", "top_p", "min_p")}
    return {name: _as_lists(value) for name, value in said.items() if value is not None}


def _as_lists(value: Any) -> Any:
    return [_as_lists(one) for one in value] if isinstance(value, tuple) else value


class _Watch:
    """Times in a call of `generate`: when each verification begins, and when its tokens are known."""

    def __init__(self, model: PreTrainedModel, depth: int) -> None:
        self._model, self._depth = model, depth
        self._passes: list[tuple[float, int]] = []
        self._puts: list[tuple[float, int]] = []
        self._began = self._ended = 0.0

    def __enter__(self) -> None:
        self._hook = self._model.register_forward_pre_hook(self._begins, with_kwargs=True)
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        self._hook.remove()

    def _begins(self, model: PreTrainedModel, args: Any, feed: Mapping[str, Any]) -> None:
        if model.config.num_hidden_layers == self._depth:  # a draft's pass has fewer
            self._passes.append((time.perf_counter(), feed["input_ids"].shape[1]))

    def put(self, tokens: Tensor) -> None:
        """Called by `generate` with the prompt, then with new tokens."""
        self._puts.append((time.perf_counter(), tokens.numel()))

    def end(self) -> None:
        """Called by `generate` last."""

    def run(self) -> TextRun:
        """The run as seen. The first pass is the prompt's; it also verifies a draft, which is not counted."""
        _, (first_at, first_tokens), *later = self._puts
        lengths = tuple(tokens for _, tokens in later)
        before = [first_at, *(at for at, _ in later)]
        passes = self._passes[1:]
        drafting = Drafting(
            lengths=lengths,
            drafted=tuple(tokens - 1 for _, tokens in passes),
            accepted=tuple(length - 1 for length in lengths),
            draft_s=sum(at - earlier for (at, _), earlier in zip(passes, before, strict=False)),
            verify_s=sum(put - at for (put, _), (at, _) in zip(later, passes, strict=True)),
        )
        return TextRun(
            new_tokens=first_tokens + sum(lengths),
            latency_s=self._ended - self._began,
            first_s=first_at - self._began,
            first_tokens=first_tokens,
            drafting=drafting,
        )
