"""`adapt`: from a model's name to a folder of heads that learned from the model's own texts."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.host import available_cores
from ppd_runtime.launch.worker_specs import USUAL_SHORTLIST
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained.heads import AFFINE, HeadInfo, model_end, save_head
from ppd_runtime.models.trained.kept_heads import COUNTS, kept_heads_folder
from ppd_runtime.models.trained.shortlist import shortlist
from ppd_runtime.training.adapt.answers import Answering, Text
from ppd_runtime.training.adapt.heads import OUTSIDE, HeadsTraining, labels_of
from ppd_runtime.training.adapt.report import AdaptReport, LayerReport, covered, ranks, shares, stages_report
from ppd_runtime.training.adapt.settings import AdaptSettings
from ppd_runtime.training.adapt.sources import prompts_of, sha256, texts_of
from ppd_runtime.training.adapt.states import KeptStates, Reader, read_all
from ppd_runtime.training.adapt.work_folder import Clock, Progress, WorkFolder, in_words, write_json
from ppd_runtime.training.run import alone
from ppd_runtime.tune.match_rates import cpu_threads

_ANSWERED, _READ, _TRAINED = 0.5, 0.7, 0.95
"""Shares of the time at which each step is over at the latest; the last ones are the report's."""
REPORT = "report.json"


def adapt(
    model: str = "demo",
    settings: AdaptSettings | None = None,
    *,
    place: Mapping[str, Any] | None = None,
    progress: Progress = lambda line: None,
    **by_name: Any,
) -> AdaptReport:
    """Train heads for a model's boundaries on its own texts; a run that was stopped goes on with the same call.

    Args:
        model: see `OrdinaryDecoding`.
        settings: see `AdaptSettings`; or
        by_name: the same by name.
        place: settings of `OrdinaryDecoding`, such as dtype, weights and threads; by default all cores' threads.
        progress: is told in a line what is being done, and how long it may take.

    Raises:
        ValueError: for anything that cannot work, before anything is written.
    """
    chosen = settings or AdaptSettings(**by_name)
    place = {"threads": available_cores(), **(place or {})}
    info = describe(model, place.get("weights"))
    layouts, kept = chosen.layouts(info), kept_heads_folder(info)
    out = chosen.out or kept.with_name(kept.name + ".new")
    with alone(out):
        ordinary = OrdinaryDecoding(model, **place)
        with cpu_threads(ordinary.config.threads_per_worker):
            report = _Adaptation(ordinary, chosen, layouts, out, progress).run(str(chosen.out or kept))
        if chosen.out is None:
            shutil.rmtree(kept, ignore_errors=True)
            out.rename(kept)
    return report


def unfinished(out: Path) -> Path:
    """The folder in which an adaptation for `out` keeps what is done."""
    return out.with_name(out.name + ".unfinished")


class _Adaptation:
    """The steps of an adaptation; each takes up what an earlier run has done of it."""

    def __init__(
        self,
        ordinary: OrdinaryDecoding,
        settings: AdaptSettings,
        layouts: Sequence[tuple[int, ...]],
        out: Path,
        progress: Progress,
    ) -> None:
        self._ordinary, self._settings, self._layouts, self._out = ordinary, settings, layouts, out
        self._tell, self._layers = progress, sorted({cut for cuts in layouts for cut in cuts})
        of_texts = settings.texts
        self._sources = texts_of(of_texts, ordinary) if of_texts else prompts_of(settings.prompts, ordinary)
        self._fingerprint = model_fingerprint(ordinary.info)
        self._about = {
            "model_fingerprint": self._fingerprint,
            "weights": ordinary.info.weights_name,
            "dtype": ordinary.dtype,
            "layers": self._layers,
            "sources_sha256": sha256(self._sources),
        }
        self._folder = WorkFolder(unfinished(out), self._about)
        self._clock = Clock(self._folder, settings.minutes)

    def run(self, shown: str) -> AdaptReport:
        """Take the steps that are left and write the folder, which the report calls `shown`."""
        texts = self._texts()
        kept = self._keep_states(texts)
        counts = self._counts(texts[: kept.num_texts])
        write_json(self._folder / COUNTS, counts)
        size = min(USUAL_SHORTLIST, self._ordinary.info.vocab_size)
        tokens = shortlist(size, self._ordinary.info.vocab_size, str(self._folder / COUNTS))
        labels = labels_of(kept.choices(), tokens, self._ordinary.info.vocab_size)
        held_out = torch.tensor([self._sources[text.source].held_out for text in kept.texts() for _ in text.places])
        learnt = torch.nonzero(~held_out & (labels != OUTSIDE))[:, 0]
        end = model_end(self._ordinary.stage.model, tokens)
        training = HeadsTraining(end, kept, labels, learnt, self._folder, self._about)
        training.run(self._clock, _TRAINED, self._tell)
        self._tell("comparing on held-out tokens")
        report = self._report(shown, kept, training, end, labels, held_out)
        self._write(training, report, counts)
        shutil.rmtree(self._folder.folder)
        return report

    def _texts(self) -> list[Text]:
        if self._settings.texts:
            return [Text(number, source.token_ids, 1) for number, source in enumerate(self._sources)]
        answering = Answering(self._ordinary, self._sources, self._folder / "answers.jsonl")
        if not (self._folder / "texts.jsonl").exists():  # kept states are of the answers that there were
            answering.run(self._clock, _ANSWERED, self._tell)
        return answering.texts()

    def _keep_states(self, texts: Sequence[Text]) -> KeptStates:
        """Keep states until their time is over or the room is used, of a held-out text and another in any case."""
        stage, folder = self._ordinary.stage, self._folder.folder
        kept = KeptStates(folder, self._layers, stage.model.config.hidden_size)
        if (self._folder / "heads-began.json").exists():
            return kept
        room = min(1e9 * self._settings.disk_gb, 0.9 * shutil.disk_usage(folder).free)
        for done in read_all(kept, texts, Reader(stage, self._layers), room):
            left = self._clock.left(_READ)
            self._tell(f"states: {done} of {len(texts)} texts, at most {in_words(left)}")
            if not left and self._has_both(texts[:done]):
                break
        if not self._has_both(texts[: kept.num_texts]):
            raise ValueError(f"disk_gb={self._settings.disk_gb:g}: has no room for the states of two texts, give more")
        return kept

    def _has_both(self, texts: Sequence[Text]) -> bool:
        return len({self._sources[text.source].held_out for text in texts}) == 2

    def _counts(self, texts: Sequence[Text]) -> dict[str, int]:
        """How often each token was chosen in texts to learn from."""
        learnt = (text for text in texts if not self._sources[text.source].held_out)
        found = Counter(token for text in learnt for token in text.token_ids[text.first :])
        return {str(token): count for token, count in found.most_common()}

    def _report(
        self,
        shown: str,
        kept: KeptStates,
        training: HeadsTraining,
        end: PreTrainedModel,
        labels: Tensor,
        held_out: Tensor,
    ) -> AdaptReport:
        compared, device = torch.nonzero(held_out)[:, 0], end.device
        places = [self._sources[text.source].kind for text in kept.texts() for _ in text.places]
        kinds, wanted = [places[number] for number in compared.tolist()], labels[compared]
        states = {layer: kept.states(layer)[compared] for layer in kept.layers}
        before = {layer: ranks(FinalHead(end), some, wanted, device) for layer, some in states.items()}
        after = {layer: ranks(training.heads[layer], some, wanted, device) for layer, some in states.items()}
        return AdaptReport(
            model=self._ordinary.info.name,
            folder=shown,
            texts=kept.num_texts,
            places=training.num_places,
            steps=training.steps,
            minutes=round(self._clock.spent / 60, 2),
            held_out=dict(Counter(kinds)),
            shortlist=end.lm_head.out_features,
            covered=covered(wanted),
            layers=tuple(LayerReport(one, shares(before[one], kinds), shares(after[one], kinds)) for one in states),
            stages=tuple(stages_report(cuts, before, after) for cuts in self._layouts),
        )

    def _write(self, training: HeadsTraining, report: AdaptReport, counts: Mapping[str, int]) -> None:
        """The folder: a folder for each head, the counts by which its shortlist was chosen, and the report."""
        info = self._ordinary.info
        with atomic_file(self._out) as folder:
            folder.mkdir()
            write_json(folder / COUNTS, counts)
            (folder / REPORT).write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
            for layer in report.layers:
                known = HeadInfo(
                    folder=folder,
                    model=info.name,
                    model_fingerprint=self._fingerprint,
                    exit_layer=layer.layer,
                    hidden_size=training.hidden_size,
                    vocab_size=info.vocab_size,
                    weights_sha256="",
                    kind=AFFINE,
                )
                account = {**self._about, "steps": report.steps, "tokens": report.places, "held_out": layer.after}
                save_head(folder / f"layer-{layer.layer}", training.heads[layer.layer], known, account)
