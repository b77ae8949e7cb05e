"""One process' invariants (docs/design.md) as assertions; those of the whole are in `system.py` and `search.py`."""

from model_check.processes import Process, Scenario
from model_check.toy import ToyModel, ToyStage
from model_check.toy_rows import ToyRows
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.staged.decider import StagedDecider
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.tree import NodeTree

Stage = FirstStage | MiddleStage | StagedDecider


def check_process(scenario: Scenario, process: Process) -> None:
    """Raise AssertionError where a process holds or has delivered what it must not."""
    if process.worker is None:
        check_delivered(scenario, process)
        return
    for session in process.worker._sessions.values():
        machine = session.machine
        if isinstance(machine, Stage):
            tree = machine._tree if isinstance(machine, StagedDecider) else machine.tree
            _check_tree(scenario.model, machine.stage, tree, tuple(machine.begin.prompt_ids))
            if scenario.mendable and isinstance(machine, LastStage):
                assert machine.epoch <= 1, "another attempt begins, for what could be sent again"
        else:
            _check_caches(scenario.model, machine)


def check_delivered(scenario: Scenario, client: Process) -> None:
    """The caller has ordinary decoding's tokens, each once and in order; in the end all of them."""
    for request in range(1, scenario.requests + 1):
        expected, got = ([t for r, t in of_all if r == request] for of_all in (scenario.expected(), client.delivered))
        assert got == expected[: len(got)], f"the caller got {got}, ordinary decoding gives {expected}"
        assert not client.dead or got == expected, f"the request ended with {got} instead of {expected}"
    in_order = [request for request, _ in client.delivered]
    assert scenario.at_once or in_order == sorted(in_order), "one request after the other"


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


def _check_tree(model: ToyModel, stage: ToyRows, tree: NodeTree, prompt: tuple[int, ...]) -> None:
    """Every certain token is ordinary decoding's, and what is held is that of nodes that may come true, and theirs."""
    certain, layers = tuple(tree.history), range(stage.first, stage.first + stage.num_layers)
    assert certain == model.text(prompt, len(certain)), f"{certain} is taken for certain"
    kept = certain[: len(stage.kept[0])]
    expected = [list(model.ordinary(kept).entries[layer]) if kept else [] for layer in layers]
    assert stage.kept == expected, f"kept entries are not those of {kept}"
    texts = {node.number: tuple(tree.text(node)) for node in tree.alive()}
    wrong = [text for text in texts.values() if text[: len(certain)] != certain[: len(text)]]
    assert not wrong, f"{wrong} are in flight behind {certain}"
    nodes = {node.number: texts[node.number] for node in tree.alive() if node.has_run and not node.is_kept}
    assert stage.nodes.keys() == nodes.keys(), f"{stage.nodes.keys()} are held, {nodes} have run and may come true"
    assert texts.keys() >= stage.begun.keys(), f"{stage.begun.keys()} run on, and {texts.keys()} may come true"
    for number, entries in (stage.nodes | stage.begun).items():
        text = texts[number]
        held = [model.ordinary(text).entries[layer][-1] for layer in layers]
        assert entries == held[: len(entries)], f"a node holds entries of another text than {text}"
