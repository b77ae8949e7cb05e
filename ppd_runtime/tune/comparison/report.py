"""A comparison's figures: all that was measured as JSON, and tables in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ppd_runtime.config import ALL_FORMATS
from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.tune.comparison.figures import WINDOWS, MethodFigures, Pair, Spread, method_figures
from ppd_runtime.tune.comparison.rows import BASELINE, LeftOut, MethodRow, full_settings
from ppd_runtime.tune.comparison.run import ComparisonRun
from ppd_runtime.tune.machine_load import busy_note
from ppd_runtime.tune.markdown import markdown_table
from ppd_runtime.tune.measured_on import machine, versions

Columns = Mapping[str, Callable[[MethodFigures], str]]
"""Column heads, and a method's cell for each."""
_NOTES = """\
Speed-ups are medians of the texts' own ratios, with quartiles, except where all texts are taken together. α: accepted
drafts among draft steps. M: tokens for each full pass, the prompt's among them. CR: tokens for each verification.
CTAR(w): share of the verifications that gave more than w tokens. s: draft steps for each verification. c and v: the
time of a draft step and of a verification over that of an ordinary step; where drafting runs the first layers for both,
over the newest certain token, that is v's. Allowed: CR / (1 + s·c), SWIFT's equation 6 as it is printed, which takes a
verification for the price of an ordinary step; for ppd Theorem 4.1 with the match rate of these texts. Measured: by how
much "together" is above or below."""
_TABLE_1 = {
    "constant": "LayerSkip (constant length)",
    "confidence": "Draft & Verify (confidence)",
    "product": "AdaSPEED (no probe)",
    "probe": "AdaSPEED (probe)",
}
"""The rows of AdaSPEED's Table I by stopping rule."""
_COLUMNS: Columns = {
    "tokens/s": lambda f: _number(f.tokens_per_second, 1),
    "speed-up": lambda f: _spread(f.speedup),
    "α": lambda f: _number(f.acceptance_rate, 3),
    "M": lambda f: _number(f.mean_accepted_length, 2),
    "CR": lambda f: _number(f.compression_rate, 2),
    **{f"CTAR({w})": lambda f, w=w: _number(f.ctar[w - 1], 2) for w in WINDOWS},  # type: ignore[misc]
    "texts equal": lambda f: _share(f.equal_texts),
    "tokens equal": lambda f: _share(f.equal_tokens),
}
_COST_COLUMNS: Columns = {
    "of each text": lambda f: _spread(f.step_speedup),
    "together": lambda f: _number(f.pooled_step_speedup, 2),
    "allowed": lambda f: _number(f.allowed_speedup, 2),
    "measured": lambda f: _deviation(f.pooled_step_speedup, f.allowed_speedup),
    "s": lambda f: _number(f.draft_steps, 2),
    "c": lambda f: _number(f.draft_cost, 3),
    "v": lambda f: _number(f.verification_cost, 3),
}


_SHORT_COLUMNS: Columns = {
    "tokens/s": lambda f: _number(f.tokens_per_second, 1),
    "speed-up": lambda f: _number(f.speedup.median, 2),
    "allowed": lambda f: _number(f.allowed_speedup, 2),
    "α": lambda f: _number(f.acceptance_rate, 2),
    "M": lambda f: _number(f.mean_accepted_length, 2),
    "equal": lambda f: _share(f.equal_tokens),
}


@dataclass(frozen=True)
class Conditions:
    """What all rows have in common."""

    model: str
    dtype: str
    weights: str
    """The format of the model's weights, or floats."""
    device: str
    threads: int
    compile: bool
    sampling: Mapping[str, Any]
    rounds: int
    num_prompts: int
    cut_prompts: int
    """Prompts that lost their beginnings, to fit the model's positions."""
    machine: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class ComparisonReport:
    """What a comparison found."""

    conditions: Conditions
    rows: tuple[MethodRow, ...]
    pairs: Mapping[str, Mapping[str, Sequence[Pair]]]
    """By group and row's label."""
    failures: Mapping[str, str]
    """Why a row has no figures, by label."""
    left_out: tuple[LeftOut, ...]

    @cached_property
    def overall(self) -> dict[str, MethodFigures]:
        """Each row's figures over all groups, in the rows' order; those that failed are absent."""
        labels = [row.label for row in self.rows if row.label not in self.failures]
        pairs = {label: [p for group in self.pairs.values() for p in group.get(label, ())] for label in labels}
        return {label: method_figures(some) for label, some in pairs.items() if some}

    @cached_property
    def by_group(self) -> dict[str, dict[str, MethodFigures]]:
        """The figures, group by group."""
        return {
            group: {label: method_figures(pairs[label]) for label in self.overall if label in pairs}
            for group, pairs in self.pairs.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values, with every text's own counts and times."""
        settings = {row.label: {"method": row.method, "settings": full_settings(row)} for row in self.rows}
        return {
            **asdict(self.conditions),
            "rows": settings,
            "left_out": {row.label: row.reason for row in self.left_out},
            "failures": dict(self.failures),
            "overall": {label: asdict(figures) for label, figures in self.overall.items()},
            "by_group": {
                group: {label: asdict(figures) for label, figures in rows.items()}
                for group, rows in self.by_group.items()
            },
            "adaspeed_table_1": dict(self.table_1()),
            "texts": {
                group: {label: [_text(pair) for pair in pairs] for label, pairs in rows.items()}
                for group, rows in self.pairs.items()
            },
        }

    def table_1(self) -> dict[str, tuple[str, float, float]]:
        """AdaSPEED's Table I: by its row's name our row, tokens per second, and the ratio to LayerSkip's.

        It has no rows with settings other than the stopping rule.
        """
        found = {_rule(row): row.label for row in self.rows if _rule(row) and row.label in self.overall}
        if len(found) < 2 or "constant" not in found:
            return {}
        speeds = {rule: self.overall[found[rule]].tokens_per_second for rule in _TABLE_1 if rule in found}
        return {_TABLE_1[rule]: (found[rule], speed, speed / speeds["constant"]) for rule, speed in speeds.items()}

    def markdown(self) -> str:
        """All tables, with explanations."""
        parts = [f"# Ways of decoding {self.conditions.model}", self.summary(), self._table(_COLUMNS), _NOTES]
        parts += ["## What drafts allow behind the first token", self._table(_COST_COLUMNS)]
        if len(self.by_group) > 1:
            parts += ["## By group: speed-up (CR)", self._group_table()]
        if self.table_1():
            parts += ["## AdaSPEED's Table I", self._table_1()]
        notes = self.notes()
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
        return "\n\n".join(parts) + "\n"

    def title(self) -> str:
        """A short title for a chart."""
        known = self.conditions
        return f"{known.model}, {known.num_prompts} prompts, {'compiled' if known.compile else 'not compiled'}"

    def summary(self) -> str:
        """One line: what was decoded and how."""
        known, sampling = self.conditions, self.conditions.sampling
        decoding = f"temperature {sampling['temperature']:g}" if sampling["temperature"] else "greedy"
        texts = f"{known.num_prompts} prompts, {sampling['max_new_tokens']} new tokens at the most"
        rounds = f", {known.rounds} rounds" * (known.rounds > 1)
        few_bits = f"{known.weights} weights, " * (known.weights in ALL_FORMATS)
        place = f"{few_bits}{known.dtype} on {known.device}, {known.threads} CPU thread{'s' * (known.threads > 1)}"
        return f"{texts}{rounds}, {decoding}, {place}{', compiled' * known.compile}. {known.machine}"

    def notes(self) -> list[str]:
        """What is missing, was cut or differs, a line each."""
        cut = self.conditions.cut_prompts
        notes = [f"{cut} of {self.conditions.num_prompts} prompts were longer than the model's positions leave room "
                 "for, and lost their beginnings."] if cut else []  # fmt: skip
        notes += self._busy()
        notes += [f"{label} failed: {reason}" for label, reason in self.failures.items()]
        notes += [f"{row.label} is left out: {row.reason}" for row in self.left_out]
        return notes + [
            f"{label}: {_differing(figures)}" for label, figures in self.overall.items() if figures.equal_texts < 1
        ]

    def short_table(self) -> tuple[list[str], list[list[str]]]:
        """Column heads and rows of what matters most."""
        return ["method", *_SHORT_COLUMNS], self._cells(_SHORT_COLUMNS)

    def _busy(self) -> list[str]:
        """A note if the machine was busy."""
        share = self.overall[BASELINE].cpu_share / self.conditions.threads
        note = busy_note("Ordinary decoding", share) if self.conditions.device == "cpu" else None
        return [f"{note} Methods with processes of their own may have had another share."] if note else []

    def _table(self, columns: Columns) -> str:
        return markdown_table(["method", *columns], self._cells(columns))

    def _cells(self, columns: Columns) -> list[list[str]]:
        return [[row.label, *self._row(row.label, columns)] for row in self.rows]

    def _row(self, label: str, columns: Columns) -> list[str]:
        if label not in self.overall:
            return ["failed", *([""] * (len(columns) - 1))]
        return [cell(self.overall[label]) for cell in columns.values()]

    def _group_table(self) -> str:
        rows = [
            [label, *(_group_cell(figures.get(label)) for figures in self.by_group.values())] for label in self.overall
        ]
        return markdown_table(["method", *self.by_group], rows)

    def _table_1(self) -> str:
        rows = [[name, label, f"{speed:.1f}", f"{ratio:.2f}"] for name, (label, speed, ratio) in self.table_1().items()]
        return markdown_table(["method", "row here", "tokens/s", "over LayerSkip"], rows)


def summarise(run: ComparisonRun, left_out: Sequence[LeftOut] = ()) -> ComparisonReport:
    """What a run has found so far."""
    ordinary = run.methods.ordinary
    conditions = Conditions(
        model=ordinary.info.name,
        dtype=ordinary.dtype,
        weights=ordinary.info.weights_name,
        device=str(ordinary.stage.device),
        threads=ordinary.config.threads_per_worker,
        compile=bool(ordinary.config.compile),
        sampling=run.sampling.as_dict(),
        rounds=run.rounds,
        num_prompts=run.num_prompts,
        cut_prompts=run.cut_prompts,
        machine=machine(),
        versions=versions(),
    )
    return ComparisonReport(conditions, run.methods.rows, run.pairs(), run.failures, tuple(left_out))


def write_markdown(report: ComparisonReport, path: Path) -> None:
    """Write the tables; the file appears when it is whole."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(report.markdown(), encoding="utf-8")


def _group_cell(figures: MethodFigures | None) -> str:
    return f"{figures.speedup.median:.2f} ({figures.compression_rate:.2f})" if figures else "-"


def _rule(row: MethodRow) -> str | None:
    """The stopping rule of LayerSkip or AdaSPEED without other settings."""
    if row.method == "layerskip" and not row.settings:
        return "constant"
    if row.method != "adaspeed" or set(row.settings) - {"stopping"}:
        return None
    return row.settings.get("stopping", "product")


def _text(pair: Pair) -> dict[str, Any]:
    return asdict(pair.run) | {"agreement": asdict(pair.agreement)}


def _deviation(measured: float | None, allowed: float | None) -> str:
    return "-" if measured is None or not allowed else f"{measured / allowed - 1:+.1%}"


def _differing(figures: MethodFigures) -> str:
    gap = figures.largest_gap
    where = "" if gap is None else f" where two tokens' scores are {gap:.3g} apart at the most"
    return f"{_share(figures.equal_texts)} of the texts are ordinary decoding's, the others leave it{where}."


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(values: Spread | None) -> str:
    return "-" if values is None else f"{values.median:.2f} ({values.low:.2f} to {values.high:.2f})"


def _share(value: float) -> str:
    """A share's text; "all" only if it is 1."""
    return "all" if value == 1 else f"{min(value, 0.9999):.2%}"
