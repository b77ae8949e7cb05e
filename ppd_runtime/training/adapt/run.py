"""`adapt`: from a model's name to a folder of heads that learned from the model's own texts."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.host import available_cores
from ppd_runtime.launch.found_layout import ASKED, keep, measured_layouts
from ppd_runtime.launch.worker_specs import USUAL_SHORTLIST
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.models.checkpoint.description import ModelInfo, check_hidden_states, describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import weight_bytes
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained.drafter import DrafterInfo, save_drafter
from ppd_runtime.models.trained.heads import AFFINE, HeadInfo, HeadNetwork, model_end, save_head
from ppd_runtime.models.trained.kept_heads import COUNTS, DRAFTER, head_name, kept_heads_folder
from ppd_runtime.models.trained.shortlist import shortlist
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.training.adapt.answers import Answering, Text
from ppd_runtime.training.adapt.drafting import OWN_STEPS, DraftedText, DrafterTraining, KeptDrafts, drafted
from ppd_runtime.training.adapt.earlier import EarlierParts, foreseen
from ppd_runtime.training.adapt.head_choice import EARLIER, OWN
from ppd_runtime.training.adapt.heads import OUTSIDE, HeadsTraining, labels_of
from ppd_runtime.training.adapt.report import (
    AFTER,
    BEFORE,
    DRAFTER_STEP,
    GREEDY,
    SAMPLED,
    AdaptReport,
    Guesser,
    HeldOut,
)
from ppd_runtime.training.adapt.settings import AdaptSettings
from ppd_runtime.training.adapt.sources import prompts_of, sha256, texts_of
from ppd_runtime.training.adapt.states import KeptStates, KeptText, Reader, read_all, room
from ppd_runtime.training.adapt.work_folder import Clock, Progress, WorkFolder, in_words, write_json
from ppd_runtime.training.run import alone, locked
from ppd_runtime.tune.match_rates import cpu_threads

_ANSWERED, _READ, _TRAINED_BEFORE_DRAFTER, _TRAINED = 0.27, 0.5, 0.7, 0.95
"""Shares of the time at which each step is over at the latest; the last ones are the report's."""
_LEAST_MINUTES = 5.0
"""With which layouts are measured in the end, in a minute or two of their own."""
REPORT = "report.json"


def adapt(
    model: str = "demo",
    settings: AdaptSettings | None = None,
    *,
    place: Mapping[str, Any] | None = None,
    progress: Progress = lambda line: None,
    **by_name: Any,
) -> AdaptReport:
    """Train heads for a model's boundaries and a drafter on its own texts; the same call goes on with a stopped run.

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
    check_hidden_states(info, "training")
    layouts, kept = chosen.layouts(info), kept_heads_folder(info)
    out = chosen.out or kept.with_name(kept.name + ".new")
    with alone(out) if chosen.out else locked(out, f"model {model!r}: another run adapts it: wait, or give out"):
        if chosen.out is None and out.is_dir():  # whole parts of a run that was killed before it moved them
            _move(out, kept)
        ordinary = OrdinaryDecoding(model, **place)
        with cpu_threads(ordinary.config.threads_per_worker):
            report = _Adaptation(ordinary, chosen, layouts, out, progress).run(str(chosen.out or kept))
        if chosen.out is None:
            _move(out, kept)
        config = RuntimeConfig(model, **{name: value for name, value in place.items() if name in ASKED})
        report = replace(report, plan=_planned(config, ordinary.info, chosen, progress))
        _write_report(Path(report.folder), report)
    return report


def _move(whole: Path, kept: Path) -> None:
    """Put whole parts in the kept ones' place; what is left of their training goes, too."""
    shutil.rmtree(kept, ignore_errors=True)
    whole.rename(kept)
    shutil.rmtree(unfinished(whole), ignore_errors=True)


def _planned(config: RuntimeConfig, info: ModelInfo, settings: AdaptSettings, progress: Progress) -> dict[str, Any]:
    """What layouts take with the parts, which `layout="auto"` knows from then on where it finds these parts."""
    if settings.minutes < _LEAST_MINUTES:
        return {"verdict": "layouts were not measured in so short a time; `ppd plan` does it"}
    folder = None if settings.out is None else str(settings.out)
    try:
        told = "after the minutes, with the parts: {}".format
        answer = measured_layouts(config, lambda line: progress(line and told(line)), folder)
    except RuntimeError as error:
        return {"verdict": f"layouts were not measured: {error}"}
    except KeyboardInterrupt:  # the parts are whole: no later run would go on
        return {"verdict": "layouts were not measured to the end"}
    if folder is None:
        keep(config, info, answer["found"], answer["cpu_share"])
    return answer["plan"]


def _write_report(folder: Path, report: AdaptReport) -> None:
    (folder / REPORT).write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")


def unfinished(out: Path) -> Path:
    """The folder in which an adaptation for `out` keeps what is done."""
    return out.with_name(out.name + ".unfinished")


_Guesses = Callable[[Text, KeptText], Iterator[tuple[Guesser, Tensor]]]
"""Logits `[rows, shortlist]` of a text's last places, by guesser."""


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
        self._sources = texts_of(of_texts, ordinary) if of_texts is not None else prompts_of(settings.prompts, ordinary)
        self._fingerprint = model_fingerprint(ordinary.info)
        self._about = {
            "model_fingerprint": self._fingerprint,
            "weights": ordinary.info.weights_name,
            "dtype": ordinary.dtype,
            "layers": self._layers,
            "drafter": settings.drafter,
            "sources_sha256": sha256(self._sources),
        }
        self._folder = WorkFolder(unfinished(out), self._about)
        self._clock = Clock(self._folder, settings.minutes)

    def run(self, shown: str) -> AdaptReport:
        """Take the steps that are left and write the folder, which the report calls `shown`."""
        texts, info, model = self._texts(), self._ordinary.info, self._ordinary.stage.model
        kept = self._keep_states(texts)
        texts = texts[: kept.num_texts]
        write_json(self._folder / COUNTS, self._counts(texts))
        tokens = shortlist(min(USUAL_SHORTLIST, info.vocab_size), info.vocab_size, str(self._folder / COUNTS))
        labels = labels_of(kept.choices(), tokens, info.vocab_size)
        held_out = torch.tensor([self._sources[text.source].held_out for text in kept.texts() for _ in text.places])
        learnt = torch.nonzero(~held_out & (labels != OUTSIDE))[:, 0]
        end = model_end(model, tokens)
        training = HeadsTraining(end, kept, self._layers, labels, learnt, self._folder)
        training.run(self._clock, _TRAINED_BEFORE_DRAFTER if self._settings.drafter else _TRAINED, self._tell)
        numbers = weight_bytes(info, 0, info.num_layers, torch.float32) // torch.float32.itemsize
        earlier = self._earlier()
        training.choose(torch.nonzero(held_out)[:, 0], numbers, earlier.networks(self._layers, end, tokens))
        drafter = self._train_drafter(kept, texts, labels, tokens) if self._settings.drafter else None
        self._tell("comparing on held-out tokens")
        guesses = _guesses(kept, end, training.heads, drafter.drafts if drafter else None)
        report = self._report(shown, kept, training, self._compared(kept, texts, labels, tokens, guesses))
        report = replace(report, stayed=tuple(earlier.lines(training.choices)))
        if earlier.drafter and drafter:
            report, drafter = self._better_drafter(report, drafter, earlier, kept, texts)
        self._write(report, training, drafter, tokens, earlier)
        shutil.rmtree(self._folder.folder)
        return report

    def _earlier(self) -> EarlierParts:
        """The parts that new ones are compared with."""
        compares = self._settings.out is None and not self._settings.replace
        return EarlierParts.of(self._ordinary.info) if compares else EarlierParts()

    def _better_drafter(
        self,
        report: AdaptReport,
        drafter: DrafterTraining,
        earlier: EarlierParts,
        kept: KeptStates,
        texts: Sequence[Text],
    ) -> tuple[AdaptReport, DrafterTraining | None]:
        """The new drafter, or None and the report of the earlier one if that foresees as many tokens or more."""
        assert earlier.drafter is not None
        model, tokens = self._ordinary.stage.model, earlier.drafter.tokens
        labels = labels_of(kept.choices(), tokens, self._ordinary.info.vocab_size)
        guesses = _guesses(kept, model, {}, earlier.drafts(model, kept))
        found = self._compared(kept, texts, labels, tokens, guesses)
        greedy, sampled = (found.comparison(way, ()).drafter for way in (GREEDY, SAMPLED))
        before, after = foreseen(greedy), foreseen(report.greedy.drafter)
        if after > before:
            return report, drafter
        line = f"the drafter, which foresees {before:.3f} tokens in a row, the new one {after:.3f}"
        comparisons = (replace(report.greedy, drafter=greedy), replace(report.sampled, drafter=sampled))
        return replace(report, stayed=(*report.stayed, line), greedy=comparisons[0], sampled=comparisons[1]), None

    def _train_drafter(
        self, kept: KeptStates, texts: Sequence[Text], labels: Tensor, tokens: Sequence[int]
    ) -> DrafterTraining:
        read = self._read(kept, texts, held_out=False)
        learnt = [_drafted(*both) for both in read if len(both[1].places) > OWN_STEPS]
        model, covers = self._ordinary.stage.model, labels != OUTSIDE
        training = DrafterTraining(model, tokens, kept, covers, learnt, self._folder)
        training.run(self._clock, _TRAINED, self._tell)
        return training

    def _read(self, kept: KeptStates, texts: Sequence[Text], held_out: bool) -> Iterator[tuple[Text, KeptText]]:
        """The texts that are held out, or the others, each with its places."""
        both = zip(texts, kept.texts(), strict=True)
        return ((text, of_text) for text, of_text in both if self._sources[text.source].held_out == held_out)

    def _texts(self) -> list[Text]:
        if self._settings.texts is not None:
            return [Text(number, source.token_ids, 1) for number, source in enumerate(self._sources)]
        answering = Answering(self._ordinary, self._sources, self._folder / "answers.jsonl")
        if not (self._folder / "texts.jsonl").exists():  # kept states are of the answers that there were
            with cpu_threads(self._ordinary.config.threads_per_worker):  # threads of its own set them
                answering.run(self._clock, _ANSWERED, self._tell)
        return answering.texts()

    def _keep_states(self, texts: Sequence[Text]) -> KeptStates:
        """Keep states until their time is over or the room is used, of a held-out text and another in any case."""
        stage, folder = self._ordinary.stage, self._folder.folder
        layers = [*self._layers, stage.num_layers]
        kept = KeptStates(folder, layers, stage.model.config.hidden_size)
        if (self._folder / "heads-began.json").exists():
            return kept
        for done in read_all(kept, texts, Reader(stage, layers), room(folder, self._settings.disk_gb)):
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

    def _compared(
        self, kept: KeptStates, texts: Sequence[Text], labels: Tensor, tokens: Sequence[int], guesses: "_Guesses"
    ) -> HeldOut:
        """The model's own guesses and the parts' on held-out texts, each of which has noise of its own."""
        found = HeldOut(self._ordinary.stage.model, tokens)
        for text, of_text in self._read(kept, texts, held_out=True):
            rows, sampler = _rows(of_text), Sampler(SamplingParams(temperature=1.0, seed=text.source))
            final, kind = kept.states(kept.layers[-1])[rows], self._sources[text.source].kind
            found.add(kind, sampler, text.first, labels[rows], final, guesses(text, of_text))
        return found

    def _report(self, shown: str, kept: KeptStates, training: HeadsTraining, found: HeldOut) -> AdaptReport:
        greedy, sampled = (found.comparison(way, self._layouts) for way in (GREEDY, SAMPLED))
        return AdaptReport(
            model=self._ordinary.info.name,
            folder=shown,
            texts=kept.num_texts,
            places=training.num_places,
            steps=training.steps,
            minutes=round(self._clock.spent / 60, 2),
            held_out=dict(Counter(found.kinds)),
            shortlist=found.shortlist,
            heads=tuple(training.choices.values()),
            greedy=greedy,
            sampled=sampled,
        )

    def _write(
        self,
        report: AdaptReport,
        training: HeadsTraining,
        drafter: DrafterTraining | None,
        tokens: Sequence[int],
        earlier: EarlierParts,
    ) -> None:
        """The folder: one for each part, the counts by which their shortlist was chosen, and the report.

        Without a new drafter the earlier one stays.
        """
        account = {**self._about, "steps": report.steps, "tokens": report.places}
        with atomic_file(self._out) as folder:
            folder.mkdir()
            shutil.copy(self._folder / COUNTS, folder / COUNTS)
            _write_report(folder, report)
            earlier.copy_heads(folder, training.choices)
            for layer in report.greedy.layers:
                choice = training.choices[layer.layer]
                if choice.kind == EARLIER:
                    continue
                head = HeadInfo(**self._known(folder, layer.layer), kind=AFFINE if choice.kind == OWN else choice.kind)
                held_out = {"held_out": layer.after, "tried": asdict(choice)["tried"]}
                save_head(folder / head_name(layer.layer), training.heads[layer.layer], head, account | held_out)
            if drafter:
                about = DrafterInfo(**self._known(folder, 0), tokens=tuple(tokens))
                made = {"steps": drafter.steps, "held_out": report.greedy.drafter}
                save_drafter(folder / DRAFTER, drafter.learner, about, account | made)
            else:
                earlier.copy_drafter(folder)

    def _known(self, folder: Path, layer: int) -> dict[str, Any]:
        """What every part's card says; see `PartInfo`."""
        return {
            "folder": folder,
            "model": self._ordinary.info.name,
            "model_fingerprint": self._fingerprint,
            "exit_layer": layer,
            "hidden_size": self._ordinary.stage.model.config.hidden_size,
            "vocab_size": self._ordinary.info.vocab_size,
            "weights_sha256": "",
        }


def _guesses(
    kept: KeptStates, end: PreTrainedModel, heads: Mapping[int, HeadNetwork], drafts: KeptDrafts | None
) -> _Guesses:
    """The guesses to compare: of the model's own head and the chosen one after each layer, and of the drafter."""
    own = FinalHead(end)

    def guesses(text: Text, of_text: KeptText) -> Iterator[tuple[Guesser, Tensor]]:
        for layer, head in heads.items():
            states = kept.states(layer)[_rows(of_text)].to(end.device, torch.float32)[None]
            yield (BEFORE, layer), own(states)[0]
            yield (AFTER, layer), head(states)[0]
        if drafts and len(of_text.places) > OWN_STEPS:
            for step, logits in enumerate(drafts.scores([_drafted(text, of_text)])):
                yield (DRAFTER_STEP, step), logits[0, step:]

    return guesses


def _drafted(text: Text, of_text: KeptText) -> DraftedText:
    return drafted(text.token_ids, text.first, of_text.places)


def _rows(of_text: KeptText) -> slice:
    return slice(of_text.places.start, of_text.places.stop)
