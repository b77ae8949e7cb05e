"""Costs of a stage's passes and heads here: measured once for a model's shapes before it is cut, then kept."""

import gc
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ppd_runtime import __version__
from ppd_runtime.files.cache_folder import capabilities, with_way_out
from ppd_runtime.files.findings import kept_finding
from ppd_runtime.launch.layout_choice import MOST_CHOSEN_ROWS, StageCosts, choose_layout
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.config import model_config, skeleton_of
from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.pass_kinds import PassKind, head_kind
from ppd_runtime.models.stage.emulation import emulated
from ppd_runtime.models.stage.graphs import current_device
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import ModelHead, ShortlistSampler
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.layouts import DECIDER, StagedLayout
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
_LAYERS = 2  # layers run, so that one does not bear a call's overhead
_PROMPT = [0, 1, 2, 3]
_LEAST_ROUNDS, _MOST_ROUNDS, _MOST_SECONDS = 3, 25, 0.1


def with_layout(
    specs: list[WorkerSpec], given: StagedLayout, config: RuntimeConfig, progress: Progress
) -> list[WorkerSpec]:
    """The stages with the given cuts, rows and k; those not given are chosen by measurement here.

    The stages' devices are assumed to be alike, and like this process'. If it has none of their kind, or cannot measure
    or store, cuts are even, passes have one row, and given rows are assumed to cost nothing.
    """
    main, stages = specs[DECIDER], given.num_stages
    guesses = specs[given.guesser]
    cuts = config.cuts if isinstance(config.cuts, tuple) else None
    costs = None
    if not (cuts and config.rows == 1):
        head = {kind: files for kind, files in main.code.items() if kind == PassKind.HEAD}
        costs = _kept_costs(replace(guesses, code={**guesses.code, **head}), progress)
    most_k = len(guesses.guess_tokens) or main.info.vocab_size
    layout = choose_layout(main.info.num_layers, stages, costs, cuts, config.rows, config.k, most_k)
    logger.info("%s, rows=%d, k=%d", layout.title(main.info.num_layers), layout.rows, layout.k)
    if stages == 1 and layout.rows == 1:
        logger.warning("stages=1: a further row of a pass costs as much as a pass here, so decoding is ordinary")
    layout = replace(layout, guess_vocab=given.guess_vocab, repetitions=given.repetitions, drafts=given.drafts)
    chosen = [replace(spec, layout=layout) for spec in specs]
    return [replace(spec, code={k: files for k, files in spec.code.items() if k in spec.code_kinds}) for spec in chosen]


def _kept_costs(spec: WorkerSpec, progress: Progress) -> StageCosts | None:
    """Costs of guessing stages like this one, measured now if they are unknown; None if that fails."""
    if spec.device.startswith("cuda") and not torch.cuda.is_available():
        return None
    try:
        numbers = kept_finding("stages", _about(spec), ["guess_head", "head", "row"], lambda: _measured(spec, progress))
    except (OSError, ValueError, RuntimeError) as error:
        reason = with_way_out(error) if isinstance(error, OSError) else error  # a folder that cannot be written
        logger.warning("stages: even cuts, and passes of one row: %s", reason)
        return None
    finally:
        if spec.device.startswith("cuda"):  # the workers need the memory
            gc.collect()
            torch.cuda.empty_cache()
    return StageCosts.rounded(*numbers)


def _about(spec: WorkerSpec) -> dict[str, Any]:
    config = model_config(spec.info.folder)
    weights = skeleton_of(config, min(_LAYERS, spec.info.num_layers)).state_dict()
    return {
        "machine": [platform.machine(), *capabilities(torch.device(spec.device))],
        "versions": [torch.__version__, __version__],
        "model": config.model_type,
        "weights": {name: list(tensor.shape) for name, tensor in weights.items()},
        "dtype": str(spec.dtype),
        "format": spec.info.weights,
        "device": spec.device.partition(":")[0],
        "threads": spec.threads,
        "rows_share_weights": spec.rows_on is not None,
        "emulated": str(spec.emulate),
        "guess_vocab": len(spec.guess_tokens),
        "code": sorted({path.name for paths in spec.code.values() for path in paths}),
    }


def _measured(spec: WorkerSpec, progress: Progress) -> tuple[float, float, float]:
    """`StageCosts`, not rounded yet, from the shortest rounds: whatever else runs here only adds time."""
    progress("measuring what a stage takes")
    layers = min(_LAYERS, spec.info.num_layers)
    with cpu_threads(spec.threads), current_device(spec.device):
        short = head_kind(len(spec.guess_tokens))
        whole = {kind: files for kind, files in spec.code.items() if kind in (PassKind.HEAD, *spec.pass_kinds)}
        stage = load_stage(spec.info, layers, spec.dtype, spec.device, whole, rows_on=spec.rows_on)
        rows, sampler = TreeRange(stage, MOST_CHOSEN_ROWS), Sampler(SamplingParams())
        head = ModelHead(emulated(stage, spec.emulate), sampler)
        if tokens := spec.guess_tokens:
            code = {kind: files for kind, files in spec.code.items() if kind == short}
            guesses = load_stage(spec.info, 1, spec.dtype, spec.device, code, head_tokens=tokens)
            shortlist = ShortlistSampler(sampler, tokens, spec.info.vocab_size)
            head = ModelHead(emulated(guesses, spec.emulate), shortlist)
        hidden, one, row = _timed_passes(rows)
        guess_head = _shortest(lambda: head.guesses(hidden, [_PROMPT], 1))
        final_head = _shortest(lambda: sampler.choose(rows.unread_logits(hidden), _PROMPT))
    return layers * guess_head / one, layers * final_head / one, row


def row_cost(stage: TreeRange) -> float:
    """What a further row adds to a pass, as a share of the first one's time."""
    return _timed_passes(stage)[2]


def _timed_passes(stage: TreeRange) -> tuple[torch.Tensor, float, float]:
    """A hidden state after a prompt, the seconds of a pass over one row, and what a further row adds to it."""
    stage.begin(len(_PROMPT) + MOST_CHOSEN_ROWS)
    hidden = stage.run_prompt(_PROMPT, 0)[:, -1:]
    one, several = (_shortest(partial(_run_pass, stage, size)) for size in (1, MOST_CHOSEN_ROWS))
    return hidden, one, (several / one - 1) / (MOST_CHOSEN_ROWS - 1)


def _run_pass(stage: TreeRange, size: int) -> None:
    """Run `size` rows, each after the one before, and forget them."""
    nodes = range(1, size + 1)
    stage.run_rows([0] * size, [list(range(1, node + 1)) for node in nodes])
    for node in nodes:
        stage.drop(node)


def _shortest(call: Callable[[], object]) -> float:
    """The seconds of a call's shortest round."""
    began, rounds = time.perf_counter(), list[float]()
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() - began < _MOST_SECONDS):
        before = time.perf_counter()
        call()
        rounds.append(time.perf_counter() - before)
    return min(rounds)
