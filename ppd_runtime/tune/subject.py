"""A loaded model and the prompts to measure it with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tune.prompt_files import read_prompts


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    ordinary: OrdinaryDecoding
    prompts: Sequence[Sequence[int]]
    """Token ids."""
    params: SamplingParams
    """With the model's own defaults."""


def loaded(model: str, source: str, limit: int | None, sampling: SamplingParams, **place: Any) -> Subject:
    """The model, in a `place` by settings of `OrdinaryDecoding`, with the prompts that `read_prompts` finds.

    Raises:
        ValueError: for a model, a setting or a file that cannot be used.
    """
    if sampling.max_new_tokens < 2:
        told = f"max_new_tokens={sampling.max_new_tokens}: times are for tokens after the first"
        raise ValueError(f"{told}, give at least 2")
    texts = [prompt.text for prompt in read_prompts(source, limit)]
    ordinary = OrdinaryDecoding(model, **place)
    params = ordinary.settled(sampling)
    return Subject(ordinary, message_ids(ordinary, texts, params.max_new_tokens), params)


def message_ids(ordinary: OrdinaryDecoding, texts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
    """The prompts that leave room for the new tokens, each as a user's message if the model has a chat template.

    Raises:
        ValueError: if none does.
    """
    if getattr(ordinary.tokenizer, "chat_template", None):
        chats = [ordinary.chat_prompt([{"role": "user", "content": text}]) for text in texts]
        return list(fitting_prompts(ordinary, chats, max_new_tokens, add_special_tokens=False).values())
    return list(fitting_prompts(ordinary, texts, max_new_tokens).values())


def fitting_prompts(
    ordinary: OrdinaryDecoding, texts: Sequence[str], max_new_tokens: int, add_special_tokens: bool = True
) -> dict[int, list[int]]:
    """Token ids of the prompts that leave room for the new tokens, by their places among the texts.

    Raises:
        ValueError: if none does.
    """
    most = ordinary.info.max_positions
    encoded = ordinary.encoded(texts, add_special_tokens=add_special_tokens)
    fitting = {
        place: ids for place, ids in enumerate(encoded) if ids and (most is None or len(ids) + max_new_tokens <= most)
    }
    if not fitting:
        raise ValueError(
            f"none of the {len(texts)} prompts and max_new_tokens={max_new_tokens} fit the model's {most} positions: "
            "give shorter prompts or ask for fewer tokens"
        )
    return fitting
