"""What `ppd bench` finds: ways of decoding on groups of prompts, beside ordinary decoding; as JSON and as tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import check_whole
from ppd_runtime.settings.config import ALL_FORMATS
from ppd_runtime.tune.compare import Comparison, compare
from ppd_runtime.tune.figures import WINDOWS, Figures, Spread, figures
from ppd_runtime.tune.machine_load import busy_note
from ppd_runtime.tune.measured_on import machine, versions
from ppd_runtime.tune.prompt_files import read_prompts
from ppd_runtime.tune.rows import BASELINE, MethodRow, full_settings
from ppd_runtime.tune.subject import fitting_prompts
from ppd_runtime.tune.tables import markdown_table
from ppd_runtime.tune.ways import opened_rows

Columns = Mapping[str, Callable[[Figures], str]]
"""Column heads, and a row's cell for each."""
_NOTES = """\
Speed-ups are medians of the texts' own ratios, with quartiles. α: accepted drafts among draft steps. M: tokens for each
full pass, the prompt's among them. Equal: tokens before a text's first difference. CR: tokens for each verification.
CTAR(w): share of the verifications that gave more than w tokens. s: draft steps for each verification. c and v: the
time of a draft step and of a verification over that of an ordinary step; where drafting runs the first layers for both,
over the newest certain token, that is v's. Allowed after the first token: CR / (1 + s·c), SWIFT's equation 6 as it is
printed, which takes a verification for the price of an ordinary step; for ppd Theorem 4.1 or N/E[J] of these texts."""
SHORT_COLUMNS: Columns = {
    "tokens/s": lambda f: _number(f.tokens_per_second, 1),
    "speed-up": lambda f: _number(f.speedup.median, 2),
    "allowed": lambda f: _number(f.allowed_speedup, 2),
    "α": lambda f: _number(f.acceptance_rate, 2),
    "M": lambda f: _number(f.mean_accepted_length, 2),
    "equal": lambda f: _share(f.equal_tokens),
}
"""The columns that matter most."""
_COLUMNS: Columns = {
    **SHORT_COLUMNS,
    "speed-up": lambda f: _spread(f.speedup),
    "after the first token": lambda f: _spread(f.step_speedup),
    "allowed": lambda f: _number(f.allowed_speedup, 2),
    "CR": lambda f: _number(f.compression_rate, 2),
    **{f"CTAR({w})": lambda f, w=w: _number(f.ctar[w - 1], 2) for w in WINDOWS},  # type: ignore[misc]
    "s": lambda f: _number(f.draft_steps, 2),
    "c": lambda f: _number(f.draft_cost, 3),
    "v": lambda f: _number(f.verification_cost, 3),
    "texts equal": lambda f: _share(f.equal_texts),
}


@dataclass(frozen=True)
class BenchReport:
    """What a comparison found."""

    conditions: Mapping[str, Any]
    """What all rows have in common, as JSON values."""
    rows: tuple[MethodRow, ...]
    overall: Mapping[str, Figures]
    """By row; those that failed are absent."""
    by_group: Mapping[str, Mapping[str, Figures]]
    failures: Mapping[str, str]
    """Why a row has no figures."""
    left_out: Mapping[str, str]
    """Why a row of "all" was not tried."""
    cpu_share: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            **self.conditions,
            "rows": {row.label: {"method": row.method, "settings": full_settings(row)} for row in self.rows},
            "left_out": dict(self.left_out),
            "failures": dict(self.failures),
            "overall": _as_json(self.overall),
            "by_group": {group: _as_json(found) for group, found in self.by_group.items()},
        }

    def markdown(self) -> str:
        """All figures, with explanations."""
        table = markdown_table(["method", *_COLUMNS], self.cells(_COLUMNS))
        parts = [f"# Ways of decoding {self.conditions['model']}", self.summary(), table, _NOTES]
        if len(self.by_group) > 1:
            rows = [[label, *(_group_cell(of[label]) for of in self.by_group.values())] for label in self.overall]
            parts += ["## By group: speed-up (CR)", markdown_table(["method", *self.by_group], rows)]
        notes = self.notes()
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
        return "\n\n".join(parts) + "\n"

    def summary(self) -> str:
        """One line: what was decoded and how."""
        known, sampling = self.conditions, self.conditions["sampling"]
        decoding = f"temperature {sampling['temperature']:g}" if sampling["temperature"] else "greedy"
        texts = f"{known['num_prompts']} prompts, {sampling['max_new_tokens']} new tokens at the most"
        rounds = f", {known['rounds']} rounds" * (known["rounds"] > 1)
        few_bits = f"{known['weights']} weights, " * (known["weights"] in ALL_FORMATS)
        threads = f"{known['threads']} CPU thread{'s' * (known['threads'] > 1)}"
        place = f"{few_bits}{known['dtype']} on {known['device']}, {threads}{', compiled' * known['compile']}"
        return f"{texts}{rounds}, {decoding}, {place}. {known['machine']}"

    def notes(self) -> list[str]:
        """What is missing or differs, a line each."""
        skipped, busy = self.conditions["skipped_prompts"], busy_note("Decoding in this process", self.cpu_share)
        notes = [f"{skipped} prompts were left out: too long for the model's positions."] if skipped else []
        notes += [busy] if busy and self.conditions["device"] == "cpu" else []
        notes += [f"{label} failed: {reason}" for label, reason in self.failures.items()]
        notes += [f"{label} is left out: {reason}" for label, reason in self.left_out.items()]
        differing = {label: one.equal_texts for label, one in self.overall.items() if one.equal_texts < 1}
        return notes + [
            f"{label}: {_share(equal)} of the texts are ordinary decoding's." for label, equal in differing.items()
        ]

    def cells(self, columns: Columns) -> list[list[str]]:
        """A line for each row."""
        return [
            [row.label, *(cell(self.overall[row.label]) for cell in columns.values())]
            if row.label in self.overall
            else [row.label, "failed", *[""] * (len(columns) - 1)]
            for row in self.rows
        ]


def read_groups(source: str, limit: int | None = None) -> dict[str, list[str]]:
    """The first `limit` prompts (None: all) of each category of a file; those without one are a group by its name.

    Raises:
        ValueError: see `read_prompts`.
    """
    if limit is not None:
        check_whole("limit", limit, 1)
    groups: dict[str, list[str]] = {}
    for prompt in read_prompts(source):
        groups.setdefault(prompt.category or Path(source).stem, []).append(prompt.text)
    return {group: texts[:limit] for group, texts in groups.items()}


def bench_rows(
    ordinary: OrdinaryDecoding,
    rows: Sequence[MethodRow],
    left_out: Mapping[str, str],
    groups: Mapping[str, Sequence[str]],
    sampling: SamplingParams,
    rounds: int = 1,
    on_prompt: Callable[[int, int], None] = lambda done, of: None,
) -> BenchReport:
    """Compare checked rows on the prompts of all groups that leave room for the new tokens; see `compare`.

    `sampling` is settled for the model; `left_out` says why others were; what is opened is closed, `ordinary` too.

    Raises:
        ValueError: where no prompt fits.
    """
    texts = [(group, text) for group, of_group in groups.items() for text in of_group]
    prompts = fitting_prompts(ordinary, [text for _, text in texts], sampling.max_new_tokens)
    with opened_rows(ordinary, rows) as ways:
        found = compare(ways, list(prompts.values()), sampling, rounds=rounds, on_prompt=on_prompt)
    places: dict[str, list[int]] = {}
    for place, number in enumerate(prompts):
        places.setdefault(texts[number][0], []).append(place)
    conditions = {
        "model": ordinary.info.name,
        "dtype": ordinary.dtype,
        "weights": ordinary.info.weights_name,
        "device": str(ordinary.stage.device),
        "threads": ordinary.config.threads_per_worker,
        "compile": bool(ordinary.config.compile),
        "sampling": sampling.as_dict(),
        "rounds": rounds,
        "num_prompts": len(prompts),
        "skipped_prompts": len(texts) - len(prompts),
        "machine": machine(),
        "versions": versions(),
    }
    return BenchReport(
        conditions,
        tuple(rows),
        _figures(found, rows, range(len(prompts))),
        {group: _figures(found, rows, own) for group, own in places.items()},
        found.failures,
        left_out,
        found.cpu_share,
    )


def _figures(found: Comparison, rows: Sequence[MethodRow], places: Sequence[int]) -> dict[str, Figures]:
    pairs = {row.label: found.pairs(row.label, BASELINE, places) for row in rows}
    return {label: figures(some) for label, some in pairs.items() if some}


def _as_json(found: Mapping[str, Figures]) -> dict[str, Any]:
    return {label: asdict(one) for label, one in found.items()}


def _group_cell(found: Figures) -> str:
    return f"{found.speedup.median:.2f} ({found.compression_rate:.2f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(values: Spread | None) -> str:
    return "-" if values is None else f"{values.median:.2f} ({values.low:.2f} to {values.high:.2f})"


def _share(value: float) -> str:
    """A share's text; "all" only if it is 1."""
    return "all" if value == 1 else f"{min(value, 0.9999):.2%}"
