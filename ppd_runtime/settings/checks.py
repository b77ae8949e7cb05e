"""Checks of what people pass; each raises a ValueError that names the value and the way out."""

import itertools
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import TypeGuard

from ppd_runtime.host import available_cores

_MOST = 1e15  # far beyond any time or factor, far from overflow


def check_int(name: str, value: object, least: int | None = None, most: int | None = None) -> None:
    """Check for Python's own int, as in settings that go to other processes and into files."""
    if isinstance(value, bool) or not isinstance(value, int):
        bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{name}={value!r:.200}: give a whole number{bounds}")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name}={value}: must be at most {most}")


def check_threads(name: str, value: int) -> None:
    """A number of CPU threads for each of which there is a core here: more would wait for each other."""
    check_int(name, value, 1)
    if value > (cores := available_cores()):
        raise ValueError(f"{name}={value}: there are {cores} CPU cores here, choose at most so many")


def check_whole(name: str, value: object, least: int) -> None:
    """A whole number of at least `least`, NumPy's too."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name}={value!r:.200}: give a whole number of at least {least}")


def check_workers(k: int, workers: int | None) -> None:
    """Sub-processes for k candidates: None, or 1 to k."""
    if workers is not None:
        check_whole("workers", workers, 1)
        if workers > k:
            raise ValueError(f"workers={workers} with k={k}: a worker needs a candidate, give {k} or fewer")


def check_share(name: str, value: object, below_one: bool = False) -> None:
    """A number from 0 to 1; with `below_one`, below 1."""
    if not _is_real(value) or not 0 <= value <= 1 or (below_one and value == 1):
        raise ValueError(f"{name}={value!r:.200}: give a number from 0 to {'below ' * below_one}1")


def check_number(name: str, value: object, least: float = 0.0) -> None:
    """A finite number of at least `least`."""
    if not _is_real(value) or not least <= value < math.inf:
        raise ValueError(f"{name}={value!r:.200}: give a finite number of at least {least:g}")
    if value > _MOST:
        raise ValueError(f"{name}={value!r:.200}: give a number of at most {_MOST:g}")


def check_range(name: str, value: object, allowed: Callable[[float], bool], range_text: str) -> None:
    """A finite number of Python's own that is `allowed`; `range_text` says which are, such as "in (0, 1]"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r:.200}: give a number {range_text}")
    if not (abs(value) <= sys.float_info.max and allowed(value)):
        raise ValueError(f"{name}={value}: must be finite and {range_text}")


def check_bool(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r:.200}: give True or False")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def check_layers(num_layers: int, exit_layer: int) -> None:
    """An exit layer that Theorem 4.1 covers: d/2 ≤ d̄ < d."""
    check_whole("num_layers", num_layers, 2)
    check_whole("exit_layer", exit_layer, 1)
    check_exit_layer(exit_layer, num_layers)


def check_device(name: str, value: object) -> None:
    """Raise ValueError for what names no kind of device."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError(f"{name}={value!r}: choose auto, cpu, cuda or cuda:<number>")


def check_exit_layer(exit_layer: int, num_layers: int) -> None:
    """A whole number that is at least half the depth and less than all of it."""
    lowest = (num_layers + 1) // 2
    if not lowest <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer={exit_layer}: with {num_layers} layers choose {lowest} to {num_layers - 1} "
            "(at least half depth, before the last layer)"
        )


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_text(text: object, most: int) -> bool:
    """Whether it is a text of 1 to `most` Unicode characters."""
    if not isinstance(text, str) or not 0 < len(text) <= most:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)  # half of a UTF-16 pair


def foreign_token(token_ids: Collection[int], vocab_size: int) -> int | None:
    """The first token id outside a vocabulary of this size; None if there is none."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return None
    return next(token for token in token_ids if not 0 <= token < vocab_size)


def check_depth(num_layers: int, user: str, model: str | None = None) -> None:
    """Raise ValueError for a model without a layer before its last, which `user` needs."""
    if num_layers < 2:
        name = "the model" if model is None else f"model {model!r}"
        raise ValueError(f"{name} has {num_layers} layer: {user} needs at least 2, give a deeper one")


def check_stages(num_layers: int, stages: int) -> None:
    """A whole number of stages that each have a layer: 2 ≤ N ≤ d."""
    check_whole("num_layers", num_layers, 2)
    check_whole("stages", stages, 2)
    if stages > num_layers:
        raise ValueError(f"stages={stages}: with {num_layers} layers choose 2 to {num_layers}")


def check_cuts(num_layers: int, cuts: Sequence[int], name: str = "cuts") -> None:
    """One layer or several from 1 to d − 1, in rising order; `name` is the setting's."""
    check_whole("num_layers", num_layers, 2)
    for cut in cuts:
        check_whole(name, cut, 1)
    ends = [0, *cuts, num_layers]
    if not cuts or any(first >= last for first, last in itertools.pairwise(ends)):
        asked = ",".join(map(str, cuts))
        choice = f"with {num_layers} layers give layers from 1 to {num_layers - 1}, each above the one before"
        raise ValueError(f"{name}={asked!r}: {choice}")


def even_cuts(num_layers: int, stages: int) -> tuple[int, ...]:
    """The cuts of stages whose numbers of layers differ by one at most."""
    check_stages(num_layers, stages)
    return tuple(num_layers * stage // stages for stage in range(1, stages))


def stage_layers(num_layers: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Each stage's number of layers."""
    check_cuts(num_layers, cuts)
    return tuple(last - first for first, last in itertools.pairwise([0, *cuts, num_layers]))


def can_run_ahead(num_layers: int, exit_layer: int, k: int) -> bool:
    """Whether a lone sub-process' last state is the next exit state."""
    return k == 1 and num_layers == 2 * exit_layer


def parsed_cuts(text: str) -> tuple[int, ...]:
    """Layers with commas between them; raises ValueError for other texts."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"cuts={text!r:.200}: give layers in ascending order, such as 3,6,9") from error


def joined_cuts(cuts: Iterable[int]) -> str:
    """Layers as `parsed_cuts` reads them."""
    return ",".join(map(str, cuts))


def check_shared_rows(compile: bool | None, weights: str | None, layout: str | None) -> None:
    """Raise ValueError for settings that need other passes than `rows_share_weights`."""
    for name, value in {"compile": compile, "weights": weights, "layout": layout}.items():
        if value:
            raise ValueError(f"rows_share_weights=True with {name}={value!r}, which needs other passes: drop one")
