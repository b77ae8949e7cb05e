"""What a token takes by each way of guessing, kept on disk from one start to the next."""

import contextlib
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ppd_runtime import __version__
from ppd_runtime.files.cache_folder import capabilities
from ppd_runtime.files.findings import note, noted
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.trained.heads import HeadInfo
from ppd_runtime.pipeline.speculation_policy import Growth
from ppd_runtime.settings.config import AUTO
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
_KIND, _EVERY_S = "guessing", 60.0


class GuessingTimes:
    """`SpeculationPolicy.way_seconds` of earlier runs with the same model, layout and machine.

    Args:
        specs: of all workers, with code and layout. Another kind of text may have other times, so these are only a
            start.
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._about, self._growth = None, Growth()
        # workers report a model or a device that cannot be read
        with contextlib.suppress(ValueError, OSError, RuntimeError, AssertionError):
            if _are_kept(specs):
                self._about, self._growth = _about(specs), Growth(specs[DECIDER].heavy_length)
        self._seconds: tuple[float, ...] = ()
        self._noted_at = time.monotonic()

    def known(self) -> tuple[float, ...]:
        """Known times; empty if there are none."""
        try:
            return noted(_KIND, self._about) if self._about else ()
        except ValueError as error:  # there is no folder for it
            logger.info("no guessing times are kept: %s", error)
            return ()

    def learn(self, seconds: tuple[float, ...], length: float) -> None:
        """A request has ended, with these `seconds` after `length` tokens; now and then they are written."""
        self._seconds = tuple(self._growth.moved(one, length, 0) for one in seconds) or self._seconds
        if time.monotonic() - self._noted_at > _EVERY_S:
            self.write()

    def write(self) -> None:
        """Keep what was learned last."""
        self._noted_at = time.monotonic()
        if self._about and any(self._seconds):
            try:
                note(_KIND, self._about, self._seconds)
            except (OSError, ValueError) as error:
                logger.info("no guessing times are kept: %s", error)


def _are_kept(specs: Sequence[WorkerSpec]) -> bool:
    """Whether another run could use them: not those of heads for tests."""
    heads = all(isinstance(spec.exit_head, str | HeadInfo) for spec in specs)
    return specs[DECIDER].speculation == AUTO and heads


def _about(specs: Sequence[WorkerSpec]) -> dict[str, Any]:
    main = specs[DECIDER]
    return {
        "machine": [platform.machine(), *capabilities(torch.device(main.device.partition(":")[0]))],
        "versions": [torch.__version__, __version__],
        "model": model_fingerprint(main.info),
        "format": [str(main.dtype), main.info.weights],
        "layout": asdict(main.layout),
        "heads": [str(spec.exit_head) for spec in specs],
        "drafter": next((spec.drafter.fingerprint for spec in specs if spec.drafter), None),
        "guess_vocab": [len(spec.guess_tokens) for spec in specs],
        "threads": main.threads,
        "emulated": str(main.emulate),
        "code": sorted({path.name for spec in specs for paths in spec.code.values() for path in paths}),
    }
