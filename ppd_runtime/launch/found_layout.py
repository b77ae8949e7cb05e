"""The layout that is the fastest for a model here: found by a short plan in a process of its own, then kept."""

import json
import logging
import platform
import shlex
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ppd_runtime import __version__
from ppd_runtime.files.cache_folder import capabilities
from ppd_runtime.files.findings import note_values, noted_values, only_one_measures
from ppd_runtime.host import UNDISTURBED, available_cores
from ppd_runtime.launch.child_python import child_command, child_environment
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.dtype import choose_device, choose_dtype
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.compiling import wants_code
from ppd_runtime.models.trained.heads import describe_heads
from ppd_runtime.models.trained.kept_heads import kept_drafter, kept_heads
from ppd_runtime.settings.checks import check_depth, check_int
from ppd_runtime.settings.config import ROOM, SHARED, RuntimeConfig

logger = logging.getLogger(__name__)
_KIND = "layout"
SECONDS = 5.0
"""That each layout runs beside ordinary decoding, three texts of about a second at least."""
PATIENCE_S = 900.0
"""Longest wait for another start that measures the same."""
_CHILD = "ppd_runtime.tune.quick_plan"
ASKED = ("model", "dtype", "weights", "device", "compile", "exit_head")
"""Settings that the plan is made for."""
_FOUND = ({"stages", "threads_per_worker"}, {"k", "threads_per_worker"})
"""The settings that a finding may consist of."""


def with_found_layout(config: RuntimeConfig, progress: Progress) -> tuple[RuntimeConfig, str]:
    """The settings with the layout found for them in place of `layout`, and a line on it; measures it if none is known.

    Raises:
        ValueError: for a model, a device or exit heads that cannot be used.
        RuntimeError: if measuring fails.
    """
    info = describe(config.model, config.weights)
    if isinstance(config.exit_head, str) and config.exit_head != SHARED:
        describe_heads(config.exit_head, info)
    check_depth(info.num_layers, "pipelined decoding", config.model)
    found = _known(_about(config, info)) or _measured_once(config, info, progress)
    settings = {**found["settings"], "layout": None, "dtype": _dtype(config, info)}
    if settings.get("stages") == 1:
        settings["exit_head"] = None  # is for boundaries
    else:
        settings["launcher"] = "processes"
    if "stages" not in settings:
        settings |= dict.fromkeys(ROOM)
    return replace(config, **settings), f"layout auto: {found['told']} (`{_command(config)}` shows why)"


def keep(config: RuntimeConfig, info: ModelInfo, found: dict[str, Any], cpu_share: float) -> None:
    """Keep a finding, which `with_found_layout` takes from then on for these settings; a warning if that fails.

    It is not kept, with a warning too, if measuring had so small a share of its CPU time that others computed as well.
    """
    if cpu_share <= UNDISTURBED:
        logger.warning("the layout that was found is not kept, but measured again next time: other programs computed")
        return
    try:
        note_values(_KIND, _about(config, info), {"found": found})
    except (OSError, ValueError) as error:
        logger.warning("the layout that was found is not kept: %s", error)


def _known(about: dict[str, Any]) -> dict[str, Any] | None:
    """The kept finding; None without a whole one."""
    try:
        found = noted_values(_KIND, about)["found"]
        for name, number in found["settings"].items():
            check_int(name, number, 1)
        return found if found["settings"].keys() in _FOUND and isinstance(found["told"], str) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def measured_layouts(config: RuntimeConfig, progress: Progress, parts: str | None = None) -> dict[str, Any]:
    """Measure the layouts that fit this machine, in a process of its own.

    Args:
        config: of which the settings in `ASKED` count.
        progress: is told what is being measured.
        parts: a folder of `ppd adapt` for stages; None: those that they find.

    Returns:
        the finding, `found`, the `cpu_share` for `keep`, and the whole `plan` as JSON values.

    Raises:
        RuntimeError: if measuring fails.
    """
    command, pipe = child_command(_CHILD), subprocess.PIPE
    answer: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=child_environment()) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            asked = {name: getattr(config, name) for name in ASKED}
            child.stdin.write(json.dumps({**asked, "seconds": SECONDS, "parts": parts}))
            child.stdin.close()
            for line in child.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(answer["progress"])
        except BaseException:  # its workers end with it
            child.kill()
            raise
    if "found" not in answer:
        reason = answer.get("error", f"the process that measures ended with code {child.returncode}")
        raise RuntimeError(reason)
    return answer


def _measured_once(config: RuntimeConfig, info: ModelInfo, progress: Progress) -> dict[str, Any]:
    """The finding of another start that measures already, or of a measurement while later starts wait."""
    about = _about(config, info)
    with ExitStack() as stack:
        try:
            stack.enter_context(only_one_measures(_KIND, about, 0.0))
        except TimeoutError:
            progress("another start measures which layout is the fastest here: waiting for it")
            try:
                stack.enter_context(only_one_measures(_KIND, about, PATIENCE_S))
            except TimeoutError:
                logger.warning("layout auto: another start has measured for %.0f s: measuring, too", PATIENCE_S)
        if found := _known(about):
            return {**found, "told": f"{found['told']}, as another start has just found"}
        return _measured(config, info, progress)


def _measured(config: RuntimeConfig, info: ModelInfo, progress: Progress) -> dict[str, Any]:
    progress("measuring which layout is the fastest here")
    try:
        answer = measured_layouts(config, progress)
    except RuntimeError as error:
        raise RuntimeError(f"layout='auto': {error}; give the layout, such as stages=1") from error
    for caution in answer["plan"]["cautions"]:
        logger.warning("layout auto: %s", caution)
    keep(config, info, answer["found"], answer["cpu_share"])
    return answer["found"]


def _about(config: RuntimeConfig, info: ModelInfo) -> dict[str, Any]:
    device = choose_device(config.device, info.weights)
    return {
        "machine": [platform.machine(), *capabilities(torch.device(device))],
        "devices": [available_cores(), torch.cuda.device_count()],
        "versions": [torch.__version__, __version__],
        "model": model_fingerprint(info),
        "format": [_dtype(config, info), info.weights],
        "place": [device, wants_code(config.compile, device), config.threads_per_worker],
        "heads": str(config.exit_head or kept_heads(info).heads),
        "drafter": (drafter := kept_drafter(info)) and drafter.weights_sha256,
    }


def _dtype(config: RuntimeConfig, info: ModelInfo) -> str:
    """What the dtype comes to before there are threads, by which "auto" may choose another one."""
    device = choose_device(config.device, info.weights)
    compiled = wants_code(config.compile, device)
    dtype = choose_dtype(config.dtype, device, info, config.threads_per_worker, compiled=compiled)
    return str(dtype).removeprefix("torch.")


def _command(config: RuntimeConfig) -> str:
    """The command that measures with these settings."""
    words, usual = ["ppd", "plan"], RuntimeConfig()
    for name in ASKED:
        value, option = getattr(config, name), name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'no-' * (not value)}{option}")
        elif value != getattr(usual, name):
            words += [f"--{option}", value]
    return shlex.join(words)
