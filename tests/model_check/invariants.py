"""One process' invariants (docs/design.md) as assertions; those of the whole are in `system.py` and `search.py`."""

from model_check.processes import Process, Scenario
from model_check.toy import ToyModel, ToyStage
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess


def check_process(scenario: Scenario, process: Process) -> None:
    """Raise AssertionError where a process holds or has delivered what it must not."""
    if process.worker is None:
        check_delivered(scenario, process)
    elif machine := _machine(process):
        _check_caches(scenario.model, machine)


def check_delivered(scenario: Scenario, client: Process) -> None:
    """The caller has ordinary decoding's tokens, each once and in order; in the end all of them."""
    expected, got = scenario.expected(), client.delivered
    assert got == expected[: len(got)], f"the caller got {got}, ordinary decoding gives {expected}"
    assert not client.dead or got == expected, f"the request ended with {got} instead of {expected}"


def _machine(process: Process) -> MainProcess | SubProcess | RunAheadSubProcess | None:
    """The state machine that a worker runs just now."""
    frame = process.gr_frame
    while frame is not None:
        if frame.f_code.co_name in ("_decode", "_speculate"):
            return frame.f_locals.get("main") or frame.f_locals.get("sub")
        frame = frame.f_back
    return None


def _check_caches(model: ToyModel, machine: MainProcess | SubProcess | RunAheadSubProcess) -> None:
    """Every token is certain or marked as a candidate, and every entry is that of its token in its text."""
    certain = text = tuple(machine.chain if isinstance(machine, RunAheadSubProcess) else machine.history)
    if isinstance(machine, RunAheadSubProcess):
        certain = text[: machine._certain]
    assert certain == model.text(tuple(machine.begin.prompt_ids), len(certain)), f"{certain} is taken for certain"
    tried = machine._trial if isinstance(machine, SubProcess) else ()
    for layer, entries in enumerate(machine.stage.entries):
        _check_layer(model, machine.stage, layer, text)
        expected = [model.ordinary((*text, token)).entries[layer][-1] for token in tried]
        assert entries[len(text) :] == expected, f"layer {layer} holds something behind {text} on trial for {tried}"


def _check_layer(model: ToyModel, stage: ToyStage, layer: int, text: tuple[int, ...]) -> None:
    held = stage.entries[layer][: len(text)]
    expected = list(model.ordinary(text).entries[layer][: len(held)])
    assert held == expected, f"layer {layer} holds entries of another text than {text}"
