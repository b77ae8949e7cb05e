"""A short plan, as a program: settings on standard input; progress, the finding and the plan as JSON lines.

`python child_python.py ppd_runtime.tune.quick_plan`
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tune.plan import plan_here
from ppd_runtime.tune.prompt_files import SHIPPED
from ppd_runtime.tune.subject import Subject, loaded
from ppd_runtime.tune.verdict import Plan

_TEXT_S = 1.0
_LEAST_TOKENS, _MOST_TOKENS = 8, 64


def main() -> None:
    """Measure and tell."""
    asked, told = json.load(sys.stdin), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer

    def tell(**answer: Any) -> None:
        told.write(json.dumps(answer) + "\n")

    try:
        exit_head, seconds, parts = asked.pop("exit_head"), asked.pop("seconds"), asked.pop("parts")
        subject = _short(loaded(asked.pop("model"), SHIPPED, None, SamplingParams(_MOST_TOKENS), **asked))
        plan = plan_here(subject, seconds, exit_head, progress=lambda line: tell(progress=line), parts=parts)
        if not plan.rows:
            raise RuntimeError("; ".join([plan.verdict.text, *plan.cautions]))
        table = {"title": plan.title, "heads": plan.heads, "rows": plan.rows}
        tell(found=finding(plan), cpu_share=plan.cpu_share, plan={**plan.as_dict(), **table})
    except (ValueError, OSError, RuntimeError) as error:
        tell(error=" ".join(str(error).split()))
        sys.exit(1)


def finding(plan: Plan) -> dict[str, Any]:
    """What `layout="auto"` takes by a plan that has run layouts: settings of `RuntimeConfig`, and a line on them.

    Ordinary decoding comes to one stage, which guesses only where that pays.
    """
    settings = {"threads_per_worker": plan.found["threads"]}
    best = next((row for row in plan.found["layouts"] if row["name"] == plan.verdict.best), None)
    if best is None:
        _, _, reason = plan.verdict.text.partition(": ")
        return {"settings": {**settings, "stages": 1}, "told": f"one stage, for no layout is worth more: {reason}"}
    settings |= {"threads_per_worker" if name == "threads" else name: value for name, value in best["settings"].items()}
    told = f"{best['name']}, {best['ms_per_token']:.3g} ms a token"
    if best["settings"].keys() == {"threads"}:
        settings["stages"] = 1
        told = f"one stage, {told} without guesses"
    return {"settings": settings, "told": f"{told}, {best['speedup']:.2f} times ordinary decoding's speed"}


def _short(subject: Subject) -> Subject:
    """With texts of about a second."""
    ordinary, prompt = subject.ordinary, subject.prompts[0]
    for _ in range(2):  # the first one warms up
        stats = ordinary.generate(prompt, max_new_tokens=_LEAST_TOKENS, ignore_eos=True).stats
    step_s = (stats.latency_s - stats.time_to_first_token_s) / (_LEAST_TOKENS - 1)
    tokens = min(max(int(_TEXT_S / step_s), _LEAST_TOKENS), _MOST_TOKENS)
    return replace(subject, params=replace(subject.params, max_new_tokens=tokens))
