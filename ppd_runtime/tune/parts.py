"""What the formulas need of a model, measured here: the parts of a token, match rates and first boundaries."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ppd_runtime.checks import even_cuts
from ppd_runtime.cost_model.devices import Parts
from ppd_runtime.cost_model.match_rates import MatchRates
from ppd_runtime.launch.layout_choice import MOST_CHOSEN_ROWS
from ppd_runtime.launch.stage_costs import row_cost
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.tune.match_rate_report import summarise
from ppd_runtime.tune.match_rates import MatchRateMeter, MatchRateSetting, cpu_threads
from ppd_runtime.tune.subject import Subject

_LEAST_TEXTS = 3


def measured_rates(
    subject: Subject, ks: Sequence[int], most_stages: int, progress: Progress = lambda line: None
) -> MatchRates:
    """Rates of every exit layer from half depth on, and first boundaries of 2 to `most_stages` even stages.

    A text's first token has no candidates and is left out.
    """
    ordinary, info, sampling = subject.ordinary, subject.ordinary.info, subject.params
    layers = tuple(range((info.num_layers + 1) // 2, info.num_layers))
    cuts = tuple(even_cuts(info.num_layers, n) for n in range(2, min(most_stages, info.num_layers) + 1))
    setting = MatchRateSetting(info.num_layers, info.vocab_size, layers, tuple(ks), sampling, cuts)
    meter, texts = MatchRateMeter(ordinary, setting), []
    for number, prompt in enumerate(subject.prompts):
        progress(f"measuring match rates, prompt {number + 1} of {len(subject.prompts)}")
        text = meter.measure(prompt, sampling.seed + number)
        text = {ranking: [row[1:] for row in rows] for ranking, rows in text.items()}
        texts += [text] if text[setting.rankings[0]][0] else []
    if not texts:
        raise ValueError("every text ended with its first token: give other prompts")
    report = summarise(info.name, ordinary.dtype, setting, texts, weights=info.weights_name)
    rates, found = report.runtime_rates, report.first_boundaries[setting.rankings[0]]
    table = {(layer, k): rates.rate(layer, k) for layer in layers for k in setting.ks}
    boundaries = {(row.cuts, k): row.shares(k) for row in found for k in setting.ks}
    source = f"{len(texts)} prompts, {rates.comparisons} tokens"
    return MatchRates(source, table, info.num_layers, boundaries, info.weights_name)


def measured_parts(subject: Subject) -> Parts:
    """The parts from ordinary decoding's own records, without hops; an exit head counts like the final one."""
    ordinary, params = subject.ordinary, replace(subject.params, ignore_eos=True)
    texts = itertools.islice(itertools.cycle(subject.prompts), _LEAST_TEXTS + 1)
    ledgers = [ordinary.generate(list(prompt), params).stats.ledger_per_token for prompt in texts][1:]
    layers, heads = (
        statistics.median(1000 * getattr(one, f"{name}_s") for one in ledgers) for name in ("layers", "heads")
    )
    ordinary.stage.compile_for(PassKind.SEVERAL)
    with cpu_threads(ordinary.config.threads_per_worker):
        further = row_cost(TreeRange(ordinary.stage, MOST_CHOSEN_ROWS))
    return Parts(layers / ordinary.info.num_layers, heads, heads, row_cost=min(max(further, 0.0), 1.0))
