"""`ppd plan`: which layout is the fastest here, measured, or on devices that are not here, by the formulas."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import check_number
from ppd_runtime.settings.config import RuntimeConfig, in_process_config
from ppd_runtime.settings.fields import summary
from ppd_runtime.tune.device_plan import Given, plan_devices
from ppd_runtime.tune.tables import plain_table

if TYPE_CHECKING:
    from ppd_runtime.tune.verdict import Plan


@takes(
    elsewhere=options.group(Given),
    sampling=options.sampling(*options.USUAL_SAMPLING, max_new_tokens=64),
    place=options.COMPILED,
)
def plan(
    model: options.Model = "demo",
    prompts: options.Prompts = "demo",
    seconds: Annotated[float, typer.Option(help="Run each layout so long, in turn with ordinary decoding.")] = 8.0,
    exit_head: Annotated[str | None, typer.Option(help=summary(RuntimeConfig, "exit_head"))] = None,
    drafter: Annotated[str | None, typer.Option(help=summary(RuntimeConfig, "drafter"))] = None,
    *,
    elsewhere: Settings,
    sampling: Settings,
    limit: options.Limit = None,
    as_json: options.AsJson = False,
    out: options.Out = None,
    place: Settings,
) -> None:
    """Run each layout that fits this machine on real text, rank them by speed, and advise one or none.

    Layouts are ordinary decoding with more threads, one stage, the paper's with k=1 and k=3, and stages, as far as
    there is a CPU core or a GPU for each process. Each runs in turn with ordinary decoding. Prompts are user's messages
    where the model has a chat template. What is advised is what --layout auto takes from then on.

    With --drafter stages ask it, and --layout auto takes nothing over.

    With --devices no layout runs: formulas predict its time from those of a layer, a head and a message, and from match
    rates, all of which are given.
    """
    with one_line_errors(plan):
        check_outputs(out)
        check_number("seconds", seconds)
        given = Given(**elsewhere)
        in_process_config("a plan", {"model": model, **place})
        params = SamplingParams(**sampling)
        if given.devices is None:
            planned = _measured(model, prompts, limit, params, seconds, exit_head, drafter, place)
        elif exit_head is not None:
            told = f"--exit-head {exit_head} with --devices: `ppd match-rate --exit-head` measures its rates"
            raise ValueError(f"{told}, give them as --match-rates instead")
        elif drafter is not None:
            raise ValueError(f"--drafter {drafter} with --devices, where no layout runs: drop one")
        else:
            planned = plan_devices(given, model, place.get("weights"))
        give_json(planned.as_dict(), as_json, out)
        if not as_json:
            table = plain_table(planned.heads, planned.rows) if planned.rows else ""
            print(planned.title, table, "\n".join([*planned.cautions, planned.verdict.text]), sep="\n\n")


def _measured(
    model: str,
    prompts: str,
    limit: int | None,
    params: SamplingParams,
    seconds: float,
    exit_head: str | None,
    drafter: str | None,
    place: Settings,
) -> "Plan":
    from ppd_runtime.launch.found_layout import keep
    from ppd_runtime.tune.plan import plan_here
    from ppd_runtime.tune.quick_plan import finding
    from ppd_runtime.tune.subject import loaded

    subject = loaded(model, prompts, limit, params, **place)
    planned = plan_here(subject, seconds, exit_head, drafter, show_progress)
    if planned.rows and drafter is None:
        ordinary = subject.ordinary
        config = replace(ordinary.config, exit_head=exit_head)
        keep(config, ordinary.info, finding(planned), planned.cpu_share)
    return planned
