"""What each process of a layout is given: layers, device, number format, exit head."""

import logging
import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from ppd_runtime.launch.gpus import assign_gpus
from ppd_runtime.launch.layout_choice import MOST_CHOSEN_ROWS
from ppd_runtime.models.checkpoint.config import heavy_length, model_config, skeleton_of
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.dtype import choose_device, choose_dtype
from ppd_runtime.models.compiling import wants_code
from ppd_runtime.models.draft_model import DraftModelInfo
from ppd_runtime.models.named_drafter import NamedInfo, describe_named
from ppd_runtime.models.native.library import is_float32_on_cpu
from ppd_runtime.models.stage.decoder_parts import decoder_in
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.drafter import DrafterInfo
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.models.trained.heads import HeadInfo, describe_heads
from ppd_runtime.models.trained.kept_heads import COUNTS, kept_drafter, kept_heads
from ppd_runtime.models.trained.shortlist import shortlist
from ppd_runtime.settings.checks import check_cuts, check_stages, even_cuts
from ppd_runtime.settings.config import NONE, SHARED, RuntimeConfig
from ppd_runtime.settings.layouts import DECIDER, Layout, PaperLayout, StagedLayout
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
USUAL_SHORTLIST = 8192
"""The default number of tokens to guess among, if the head is large."""
_MANY_TOKENS = 2 * USUAL_SHORTLIST
Heads = dict[int, HeadInfo] | OracleHead
"""Trained heads by their layer; empty: the shared one."""


def find_heads(config: RuntimeConfig, info: ModelInfo, launcher: str) -> Heads:
    """The exit heads that the settings name, of several those for the stages' cuts or the one for the exit layer, or
    those that are kept for them; ValueError if they are not for this model.
    """
    exit_head = config.exit_head
    if exit_head is None:
        elsewhere = launcher == "ray" and not config.one_host  # where the cache folder is another
        return {} if elsewhere else _kept_heads(config, info)
    if isinstance(exit_head, OracleHead):
        return exit_head
    if exit_head == SHARED:
        return {}
    if not isinstance(exit_head, str):
        raise ValueError(f"exit_head={exit_head!r}: give 'shared' or a folder that `ppd train exit-head` wrote")
    found = describe_heads(exit_head, info)
    if config.stages:
        cuts = config.cuts if isinstance(config.cuts, tuple) else even_cuts(info.num_layers, config.stages)
        return {cut: found[cut] for cut in cuts} if set(cuts) <= set(found) else found
    if len(found) > 1 and not (found := _at_exit(found, config, info)):
        layers = ", ".join(map(str, sorted(describe_heads(exit_head, info))))
        raise ValueError(f"exit_head={exit_head!r}: has heads for the layers {layers}: give one of them as exit_layer")
    return found


def _at_exit(heads: dict[int, HeadInfo], config: RuntimeConfig, info: ModelInfo) -> dict[int, HeadInfo]:
    """Choose among several heads the one for the exit layer; if that is not given, the nearest behind half depth.

    It lies within an eighth of the depth: a later exit leaves sub-processes less to do ahead. Empty without one.
    """
    half = math.ceil(info.num_layers / 2)
    near = range(half, half + info.num_layers // 8 + 1) if config.exit_layer is None else [config.exit_layer]
    return next(({layer: heads[layer]} for layer in near if layer in heads), {})


def find_drafter(config: RuntimeConfig, info: ModelInfo, elsewhere: bool) -> NamedInfo | None:
    """The drafter that the settings name, or the kept one, or none; ValueError if it is not for this model.

    Workers that may be `elsewhere` have other cache folders, so there is no kept one for them.
    """
    if config.drafter is None:
        return None if elsewhere else kept_drafter(info)
    return None if config.drafter == NONE else describe_named(config.drafter, info)


def _fitting(
    config: RuntimeConfig, drafter: NamedInfo | None, device: str, guess_tokens: tuple[int, ...]
) -> NamedInfo | None:
    """The drafter as it runs beside layers on `device` that guess among these tokens; None if it does not suit them."""
    if isinstance(drafter, DraftModelInfo):
        return _run_beside(config, drafter, _draft_device(config, drafter, device), guess_tokens)
    if config.drafter_device is not None:
        named = f"drafter_device={config.drafter_device!r} with drafter={config.drafter!r}"
        raise ValueError(f"{named}, which is no model: it runs beside the first stage, drop one")
    takes_others = guess_tokens and drafter and drafter.takes_head and drafter.tokens != guess_tokens
    if drafter and config.stages != 1 and takes_others:
        _check_left_aside(config, drafter)
        return None
    return drafter


def _check_one_stage(config: RuntimeConfig, drafter: NamedInfo | None, guess_tokens: tuple[int, ...]) -> None:
    """Raise ValueError for a guess_vocab that one stage cannot keep to: only draft models take other tokens there."""
    if config.stages != 1 or config.guess_vocab is None or not guess_tokens or isinstance(drafter, DraftModelInfo):
        return
    if drafter is None:
        reason = "one stage has no boundaries, and no drafter is asked"
    elif sorted(drafter.tokens) != list(guess_tokens):
        reason = f"one stage has no boundaries, and its drafter names {len(drafter.tokens)} tokens of its own"
    else:
        return
    raise ValueError(f"guess_vocab={config.guess_vocab} with stages=1: {reason}; drop guess_vocab and guess_counts")


def _run_beside(
    config: RuntimeConfig, draft: DraftModelInfo, device: str, guess_tokens: tuple[int, ...]
) -> DraftModelInfo:
    """How a draft model runs beside the layers that ask it, or on its own device."""
    device = draft.device(device)
    compiled = wants_code(config.compile, device)
    dtype = choose_dtype("auto", device, draft.info, config.threads_per_worker, compiled=compiled)
    return replace(draft, dtype=dtype, shortlist=tuple(token for token in guess_tokens if token < draft.vocab_size))


def _draft_device(config: RuntimeConfig, draft: DraftModelInfo, beside: str) -> str:
    if config.drafter_device is None:
        return beside
    found = choose_device(config.drafter_device, draft.info.weights, "drafter_device")
    return beside if found == "cuda" and beside.startswith("cuda") else found


def _check_left_aside(config: RuntimeConfig, drafter: NamedInfo) -> None:
    """Warn of a drafter whose tokens are not those that stages guess among; ValueError if the settings name it."""
    if config.drafter is None:
        logger.warning("no drafter guesses: the kept one names other tokens than guess_vocab has")
        return
    tokens = len(drafter.tokens)
    named = f"drafter={config.drafter!r}: names {tokens} tokens, others than stages guess among"
    trained = isinstance(drafter, DrafterInfo)
    counted = f"give guess_vocab={tokens} with the drafter's guess_counts, or stages=1 without guess_vocab"
    raise ValueError(f"{named}; {counted if trained else 'drop guess_vocab'}")


def _kept_heads(config: RuntimeConfig, info: ModelInfo) -> Heads:
    """Kept heads for given cuts, or for all cuts of even stages but those whose heads are damaged; or for the exit."""
    if config.num_subs == 0 or not (kept := kept_heads(info)).heads:
        return {}
    if config.stages is None:
        return dict(_at_exit(kept.heads, config, info))
    given = isinstance(config.cuts, tuple)
    cuts = config.cuts if isinstance(config.cuts, tuple) else even_cuts(info.num_layers, config.stages)
    if not given and not set(cuts) <= {*kept.heads, *kept.left_aside}:
        return {}
    return {cut: kept.heads[cut] for cut in cuts if cut in kept.heads}


def with_layers_of(heads: Heads, config: RuntimeConfig, num_layers: int) -> RuntimeConfig:
    """The settings, with exit layer or cuts from trained heads if not given; ValueError if they differ."""
    if isinstance(heads, OracleHead) or not heads:
        return config
    layers = tuple(sorted(heads))
    if config.stages is None:
        return replace(config, exit_layer=layers[0]) if config.exit_layer is None else config
    if config.cuts is None and len(layers) == config.stages - 1:
        return replace(config, cuts=layers)
    if config.cuts is None and config.exit_head is None:  # kept ones: others of them are damaged
        return replace(config, cuts=even_cuts(num_layers, config.stages))
    if others := [layer for layer in layers if layer not in (config.cuts or ())]:
        raise ValueError(
            f"exit_head={config.exit_head!r} was trained for layer {others[0]}, behind which there is no boundary: "
            "choose cuts with the heads' layers among them"
        )
    return config


def _head_of(spec: WorkerSpec, heads: Heads) -> str | HeadInfo | OracleHead:
    """A worker's exit head; for a stage, the one for the layer before its boundary."""
    if isinstance(heads, OracleHead):
        return heads
    if isinstance(spec.layout, PaperLayout):
        return next(iter(heads.values()), SHARED)
    return SHARED if spec.rank == DECIDER else heads.get(spec.num_layers, SHARED)


def paper_layout(config: RuntimeConfig, exit_layer: int, dtype: torch.dtype) -> PaperLayout:
    """The paper's layout of these settings.

    Raises:
        ValueError: if candidates would share a pass outside float32, where rounding differs.
    """
    k, workers = config.num_candidates, config.num_subs
    if workers < k and dtype != torch.float32:
        raise ValueError(
            f"workers={workers} with k={k} in {str(dtype).removeprefix('torch.')}: candidates that share a pass round "
            f"otherwise there; give workers={k}, or dtype='float32'"
        )
    return PaperLayout(k, exit_layer, workers, config.run_ahead)


def staged_layout(config: RuntimeConfig, num_layers: int, joins: bool, guess_vocab: int | None) -> StagedLayout:
    """The staged layout of these settings before anything is measured; `joins`: whether a pass may have several rows.

    Raises:
        ValueError: for stages or cuts that a model of `num_layers` layers cannot have.
    """
    assert config.stages is not None
    cuts: tuple[int, ...] = ()
    if isinstance(config.cuts, tuple):
        check_cuts(num_layers, config.cuts)
        cuts = config.cuts
    elif config.stages > 1:
        check_stages(num_layers, config.stages)
        cuts = even_cuts(num_layers, config.stages)
    rows = config.rows or (MOST_CHOSEN_ROWS if joins else 1)
    return StagedLayout(
        cuts,
        rows,
        config.num_candidates,
        guess_vocab=guess_vocab,
        repetitions=config.repetitions,
        drafts=config.drafter_device is not None,
    )


def _guess_tokens(config: RuntimeConfig, info: ModelInfo, heads: Heads, drafter: NamedInfo | None) -> tuple[int, ...]:
    """The tokens to guess among; empty: the whole vocabulary.

    The default is a shortlist for a model whose head has more weights than one of its layers, a drafter's own, or by
    the counts that lie beside trained heads, if there are any.
    """
    size = config.guess_vocab
    takes_all = drafter and not isinstance(drafter, DrafterInfo) and drafter.takes_head and config.stages != 1
    if size is None and isinstance(heads, dict) and not takes_all:
        size = USUAL_SHORTLIST if info.vocab_size > _MANY_TOKENS and _head_is_large(info) else None
    if size is None or size == info.vocab_size:
        return ()
    if isinstance(drafter, DrafterInfo) and size == len(drafter.tokens) and not config.guess_counts:
        return drafter.tokens
    return shortlist(size, info.vocab_size, config.guess_counts or _counts_beside(heads))


def _counts_beside(heads: Heads) -> str | None:
    """The file of counts by which the heads' tokens were chosen."""
    files = [head.folder.parent / COUNTS for head in heads.values()] if isinstance(heads, dict) else []
    return next((str(file) for file in files if file.is_file()), None)


def _head_is_large(info: ModelInfo) -> bool:
    """Whether a token's pass reads more of the head than of a layer."""
    skeleton = skeleton_of(model_config(info.folder), 1)
    experts = getattr(skeleton.config, "num_experts_per_tok", None)
    read = 0.0
    for weight in decoder_in(skeleton).layers[0].parameters():
        share = min(experts / weight.shape[0], 1.0) if experts and weight.dim() == 3 else 1.0
        read += share * weight.numel()
    return skeleton.lm_head.weight.numel() > read


def worker_specs(
    config: RuntimeConfig,
    launcher: str,
    info: ModelInfo,
    exit_layer: int,
    heads: Heads,
    emulate: EmulatedDevice | None,
) -> list[WorkerSpec]:
    """Specs of all processes, by rank; ValueError if this machine has no room for them."""
    by_ray = launcher == "ray"
    if by_ray:
        _check_places(config)
    elsewhere = by_ray and not config.one_host  # this host's devices say nothing of the workers'
    device = config.device if elsewhere and config.device == "cuda" else choose_device(config.device, info.weights)
    compiled = wants_code(config.compile, device)
    dtype = choose_dtype(config.dtype, device, info, config.threads_per_worker, compiled=compiled)
    drafter = find_drafter(config, info, elsewhere) if config.stages else None
    guess_tokens = _guess_tokens(config, info, heads, drafter)
    joins, guess_vocab = is_float32_on_cpu(device, dtype) or config.rows_share_weights, len(guess_tokens) or None
    layout: Layout = (
        staged_layout(config, info.num_layers, joins, guess_vocab)
        if config.stages
        else paper_layout(config, exit_layer, dtype)
    )
    processes = layout.num_processes
    devices = [device] * processes
    if device == "cuda" and not by_ray:  # Ray shows each actor a GPU of its own, the others see them all
        devices = assign_gpus(processes, torch.cuda.device_count(), config.gpus_per_worker)
    heavy = heavy_length(info.folder, dtype)
    _check_one_stage(config, drafter, guess_tokens)
    drafter = _fitting(config, drafter, device, guess_tokens)
    specs = [
        WorkerSpec(
            rank=rank,
            layout=layout,
            info=info,
            dtype=dtype,
            device=devices[rank],
            threads=config.threads_per_worker,
            rows_on=config.threads_per_worker if config.rows_share_weights else None,
            emulate=emulate,
            guess_tokens=() if rank == DECIDER else guess_tokens,
            speculation=config.speculation,
            heavy_length=heavy,
            prefix_cache_tokens=config.prefix_tokens,
            draft_memory_mb=config.draft_memory if rank == layout.guesser else 0,
            drafter=drafter,
        )
        for rank in range(processes)
    ]
    specs = [replace(spec, exit_head=_head_of(spec, heads)) for spec in specs if spec.rank != layout.drafter]
    if isinstance(drafter, DraftModelInfo) and layout.drafter is not None:
        device = _draft_device(config, drafter, devices[-1])
        specs.append(_draft_worker(specs[layout.guesser], drafter, device))
    return specs


def _check_places(config: RuntimeConfig) -> None:
    """Raise ValueError for devices that Ray cannot give workers."""
    if config.drafter_device is not None:
        raise ValueError(f"drafter_device={config.drafter_device!r} with Ray: choose launcher processes, or drop it")
    if config.device.startswith("cuda:"):
        raise ValueError(
            f"device={config.device!r} with Ray, which gives each worker a GPU of its own: choose device cuda, or "
            "launcher processes"
        )


def _draft_worker(first: WorkerSpec, draft: DraftModelInfo, device: str) -> WorkerSpec:
    """The specification of a draft model's own process, from the first stage's."""
    assert first.layout.drafter is not None
    return replace(
        first,
        rank=first.layout.drafter,
        info=draft.info,
        dtype=draft.dtype,
        device=device,
        emulate=first.emulate and first.emulate.of_draft_model(draft.info.num_layers),
        exit_head=SHARED,
        guess_tokens=draft.shortlist,
        drafter=draft,
        rows_on=None,
        draft_memory_mb=0,
        prefix_cache_tokens=0,
    )


def all_code_kinds(specs: Iterable[WorkerSpec]) -> list[int]:
    """The kinds of passes and heads that any of the model's processes needs compiled, each once."""
    return sorted(set().union(*(spec.code_kinds for spec in specs if spec.rank != spec.layout.drafter)))
