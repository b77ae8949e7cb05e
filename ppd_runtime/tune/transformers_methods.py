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

from ppd_runtime.methods.early_exit import check_exit_layer
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.checkpoint.loading import errors_only, no_progress_bar
from ppd_runtime.sampling.params import FROM_THE_MODEL, SamplingParams
from ppd_runtime.settings.checks import check_share, check_whole
from ppd_runtime.tune.compare import CannotDecodeError, Drafting, Text

Arguments = dict[str, Any]
"""What `generate` is called with."""


def _early_exit(
    info: ModelInfo,
    exit_layer: int | None = None,
    num_assistant_tokens: int = 20,
    assistant_confidence_threshold: float = 0.4,
) -> Arguments:
    """Drafts after a layer; the defaults are transformers', the layer is LayerSkip's."""
    check_whole("num_assistant_tokens", num_assistant_tokens, 1)
    check_share("assistant_confidence_threshold", assistant_confidence_threshold)
    return {
        "assistant_early_exit": check_exit_layer(exit_layer, info),
        "num_assistant_tokens": num_assistant_tokens,
        "assistant_confidence_threshold": assistant_confidence_threshold,
    }


def _prompt_lookup(info: ModelInfo, prompt_lookup_num_tokens: int = 10, max_matching_ngram_size: int = 2) -> Arguments:
    """Drafts out of the text so far; the numbers are transformers' documentation's."""
    check_whole("prompt_lookup_num_tokens", prompt_lookup_num_tokens, 1)
    check_whole("max_matching_ngram_size", max_matching_ngram_size, 1)
    return {"prompt_lookup_num_tokens": prompt_lookup_num_tokens, "max_matching_ngram_size": max_matching_ngram_size}


TRANSFORMERS_METHODS: Mapping[str, Callable[..., Arguments]] = {
    "assistant_early_exit": _early_exit,
    "prompt_lookup": _prompt_lookup,
}


def generate_arguments(method: str, settings: Mapping[str, Any], info: ModelInfo) -> Arguments:
    """`generate`'s arguments for one of `TRANSFORMERS_METHODS`; raises ValueError for settings that cannot work."""
    known = list(inspect.signature(TRANSFORMERS_METHODS[method]).parameters)[1:]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ValueError(f"{method} has no setting {unknown[0]!r}: it has {', '.join(known)}")
    return TRANSFORMERS_METHODS[method](info, **settings)


def load_whole(info: ModelInfo, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model in transformers."""
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(info.folder, dtype=getattr(torch, dtype), trust_remote_code=False)
    return model.to(device).eval()


class TransformersMethod:
    """Greedy `generate` with arguments of `generate_arguments` and so many threads; a model may serve several."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, arguments: Arguments, threads: int) -> None:
        self.threads = threads
        self._model, self._depth, self._arguments = model, info.num_layers, arguments
        self._eos_token_ids = sorted(info.eos_token_ids) or None

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Text:
        """Continue a prompt; raises `CannotDecodeError` saying why it cannot."""
        watch = _Watch(self._model, self._depth)
        try:
            with cpu_threads(self.threads):
                output = self._generate(prompt_ids, params, watch)
        except Exception as error:  # the library raises all kinds
            reason = " ".join(str(error).split())[:200]
            raise CannotDecodeError(f"{type(error).__name__}: {reason}") from error
        finally:
            self._model.config.num_hidden_layers = self._depth  # an early exit that fails leaves its own
        return watch.text(tuple(output[0, len(prompt_ids) :].tolist()))

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

    def text(self, token_ids: tuple[int, ...]) -> Text:
        """The text as seen. The first pass is the prompt's; it also verifies a draft, which is not counted."""
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
        return Text(token_ids, self._ended - self._began, first_at - self._began, first_tokens, drafting)
