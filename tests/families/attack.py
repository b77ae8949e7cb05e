"""One specimen against the oracles: ordinary decoding against transformers, every layout and method against it."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from families.specimens import BORDER, MOST_POSITIONS, Specimen
from models_for_tests import VOCAB_SIZE, build_tokenizer
from pipeline_runs import Bench, Decoded
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppd_runtime import OrdinaryDecoding, open_method
from ppd_runtime.client.ending import Ending
from ppd_runtime.methods.steps import Step, Totals, split_where_recomputed
from ppd_runtime.models.checkpoint.description import ModelInfo, check_entries_alone, describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.trained.adapter import AdapterInfo, new_adapter, save_adapter
from ppd_runtime.results import PathStats
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import even_cuts

NEW_TOKENS = 14
LENGTHS = (1, 5, 17, BORDER - 6, BORDER + 1, MOST_POSITIONS - NEW_TOKENS)
"""Of prompts: shorter than windows and longer, around the border of rotary tables, and up to the last position."""
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
LAYOUTS: dict[str, dict[str, Any]] = {
    "k=1": {"k": 1},
    "k=1, running ahead": {"k": 1, "run_ahead": True},
    "k=2": {"k": 2},
    "k=3 on one": {"k": 3, "workers": 1},
    "k=5": {"k": 5},
    "k=8 on two": {"k": 8, "workers": 2},
    "2 stages": {"stages": 2, "k": 1},
    "a stage a layer": {"k": 3, "rows": 3},
}
"""The paper's, and those of stages, which are the last two."""
METHODS: dict[str, dict[str, Any]] = {
    "layerskip": {"exit_layer": 1, "num_speculations": 5},
    "adaspeed": {"threshold": 0.02},
    "kangaroo": {"threshold": 0.02},
    "swift": {"threshold": 0.05, "context_window": 4, "search_steps": 4, "bayes_interval": 0},
    "swift, chains": {"threshold": 0.05, "search_steps": 0, "widest": 1},
}


@dataclass
class Attack:
    """A specimen saved as a model folder, and what it was seen to give."""

    specimen: Specimen
    folder: Path
    model: PreTrainedModel
    """What was saved."""
    dtype: str = "float32"
    new_tokens: int = NEW_TOKENS
    differences: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """By method, why it is refused."""
    runs: int = 0
    _texts: dict[str, list[int]] = field(default_factory=dict)
    """Ordinary decoding's, by what was asked."""

    @staticmethod
    def on(specimen: Specimen, folder: Path, dtype: str = "float32", new_tokens: int = NEW_TOKENS) -> "Attack":
        """Save the specimen; ValueError where it is refused."""
        model = specimen.build().to(getattr(torch, dtype))
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        describe(str(folder))
        return Attack(specimen, folder, model, dtype, new_tokens)

    @cached_property
    def ordinary(self) -> OrdinaryDecoding:
        """The oracle of layouts and methods."""
        return OrdinaryDecoding(str(self.folder), dtype=self.dtype)

    @cached_property
    def bench(self) -> Bench:
        """The state machines over real stages."""
        return Bench.of(self.folder, self.dtype)

    @property
    def _exit_layer(self) -> int:
        """Half of the depth, rounded up."""
        return -(-self.bench.info.num_layers // 2)

    def against_transformers(self, prompts: Sequence[list[int]]) -> None:
        """Ordinary decoding's greedy tokens are those of `generate`."""
        for prompt in prompts:
            with torch.inference_mode():
                text = self.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=self.new_tokens)
            self._compare("ordinary decoding", prompt, {}, self._expected(prompt, {}), text[0, len(prompt) :].tolist())

    def against_ordinary(
        self,
        prompts: Sequence[list[int]],
        layouts: Sequence[str],
        methods: Sequence[str],
        samplings: Sequence[dict[str, Any]] = ({}, SAMPLED),
    ) -> None:
        """Every layout's and method's tokens are ordinary decoding's, greedy and sampled."""
        asked = [(prompt, sampling) for prompt in prompts for sampling in samplings]
        for layout in layouts:
            for one in asked:
                self._compare(layout, *one, self._by_layout(layout, *one), self._expected(*one))
        for name in methods:
            if method := self._method(name):
                for one in asked:
                    self._compare(name, *one, self._generated(method, *one), self._expected(*one))

    def _expected(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        asked = str((prompt, sampling))
        if asked not in self._texts:
            self._texts[asked] = self._generated(self.ordinary, prompt, sampling)
        return self._texts[asked]

    def _generated(self, generator: Any, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        asked = {"max_new_tokens": self.new_tokens, "ignore_eos": True, **sampling}
        return list(generator.generate(prompt, **asked).token_ids)

    def _by_layout(self, layout: str, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        params = SamplingParams(max_new_tokens=self.new_tokens, ignore_eos=True, **sampling)
        decoder = _Layout(self.bench.info, self.ordinary.tokenizer, partial(self._run, layout))
        steps = split_where_recomputed(decoder, prompt, params, True, Ending(None))
        return [step.token_id for step in steps if isinstance(step, Step)]

    def _run(self, layout: str, prompt: list[int], params: SamplingParams) -> Decoded:
        if "stage" not in layout:
            return self.bench.pipelined(prompt, params, exit_layer=self._exit_layer, **LAYOUTS[layout])
        settings = dict(LAYOUTS[layout])
        num_layers = self.bench.info.num_layers
        cuts = even_cuts(num_layers, settings.pop("stages", num_layers))
        return self.bench.staged(prompt, params, cuts, **settings)

    def _method(self, name: str) -> Any:
        try:
            settings = METHODS[name] | ({"adapter": self._adapter()} if name == "kangaroo" else {})
            settings = settings | {"dtype": self.dtype, "stage": self.ordinary.stage}
            return open_method(str(self.folder), name.partition(",")[0], **settings)
        except ValueError as error:
            self.refused[name] = str(error)
            return None

    def _adapter(self) -> Path:
        folder = self.folder / "adapter"
        if not folder.exists():
            info = describe(str(self.folder))
            check_entries_alone(info, "kangaroo")
            whole = load_layers(info, info.num_layers, torch.float32, "cpu")
            size = whole.config.hidden_size
            known = (folder, info.name, model_fingerprint(info), self._exit_layer, size, info.vocab_size, "")
            save_adapter(folder, new_adapter(whole, self._exit_layer), AdapterInfo(*known), {})
        return folder

    def _compare(
        self, way: str, prompt: list[int], sampling: dict[str, Any], got: list[int], expected: list[int]
    ) -> None:
        self.runs += 1
        if got != expected:
            kind = "sampled" if sampling else "greedy"
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
            self.differences.append(f"{self.specimen.name}: {way}, {kind}, prompt of {len(prompt)}, token {at}")


@dataclass
class _Layout:
    """A layout's machines as what `split_where_recomputed` has the parts of a request from."""

    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    run: Callable[[list[int], SamplingParams], Decoded]

    def _steps(
        self, prompt_ids: list[int], params: SamplingParams, live: bool, ending: Ending
    ) -> Generator[Step | Totals, None, None]:
        decoded = self.run(prompt_ids, params)
        for number, token in enumerate(decoded.tokens, 1):
            yield Step(token, None, number == len(decoded.tokens))
        yield Totals(decoded.reason, PathStats())


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
