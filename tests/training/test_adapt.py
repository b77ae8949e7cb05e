"""Heads learn from a model's own answers: what is answered, kept, learned and reported, and that nothing is lost."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams, adapt
from ppd_runtime.launch.found_layout import with_found_layout
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained import kept_heads
from ppd_runtime.models.trained.drafter import Drafter, describe_drafter, load_drafter
from ppd_runtime.models.trained.heads import AFFINE, GATED, describe_heads, model_end
from ppd_runtime.models.trained.kept_heads import kept_heads_folder
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.training.adapt import answers, run, work_folder
from ppd_runtime.training.adapt.answers import Answering, Text
from ppd_runtime.training.adapt.drafting import DrafterTraining, drafted
from ppd_runtime.training.adapt.head_choice import EARLIER, OWN, HeadChoice, TriedHead, choose_head
from ppd_runtime.training.adapt.heads import OUTSIDE, HeadsTraining, labels_of
from ppd_runtime.training.adapt.report import (
    AFTER,
    BEFORE,
    GREEDY,
    KS,
    SAMPLED,
    AdaptReport,
    HeldOut,
    stages_report,
)
from ppd_runtime.training.adapt.sources import Source, prompts_of, shipped_prompts, texts_of
from ppd_runtime.training.adapt.states import KeptStates, Reader, read_all
from ppd_runtime.training.adapt.work_folder import Clock, Progress, WorkFolder
from ppd_runtime.training.run import locked
from ppd_runtime.tune.prompt_files import read_prompts
from tools import ship_parts

ModelFolder = Callable[..., Path]
WORDS = ("the quick brown fox", "a model writes", "one token after another", "the lazy dog waits", "layer by layer")
LONG = 1000.0
FOUND = {"settings": {"stages": 1, "threads_per_worker": 1}, "told": "one stage"}


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_TOKENS", 10)
    monkeypatch.setattr(answers, "ROUNDS", 2)


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    return model_folder("llama", num_layers=4, tied=False, quiet_from=2)


@pytest.fixture(scope="module")
def ordinary(folder: Path) -> OrdinaryDecoding:
    return OrdinaryDecoding(str(folder), dtype="float32")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{text} {number}", "category": text[:1]} for text in WORDS for number in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def sources(ordinary: OrdinaryDecoding, prompts: Path) -> list[Source]:
    return prompts_of(str(prompts), ordinary)


def work(folder: Path, minutes: float = LONG) -> tuple[WorkFolder, Clock]:
    found = WorkFolder(folder, {})
    return found, Clock(found, minutes)


def test_shipped_prompts_are_of_six_kinds() -> None:
    kinds = Counter(prompt.category for prompt in read_prompts(str(shipped_prompts())))
    assert len(kinds) == 6
    assert min(kinds.values()) >= 30
    assert shipped_prompts().stat().st_size < 75_000


def test_kinds_come_in_turn_and_some_of_each_are_held_out(sources: list[Source]) -> None:
    kinds = {source.kind for source in sources}
    assert len(sources) == 30
    assert {source.kind for source in sources[: len(kinds)]} == kinds
    assert {source.kind for source in sources if source.held_out} == kinds
    assert sum(source.held_out for source in sources) < len(sources) / 3


def test_a_chat_model_reads_its_template(ordinary: OrdinaryDecoding, prompts: Path, monkeypatch) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    monkeypatch.setattr(ordinary.tokenizer, "chat_template", template)
    texts = [ordinary.tokenizer.decode(source.token_ids) for source in prompts_of(str(prompts), ordinary)]
    assert all(text.startswith("[") and text.endswith("]") for text in texts)


def test_texts_are_read_in_pieces(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n\n".join(" ".join(WORDS) + str(number) for number in range(400)))
    found = texts_of(str(tmp_path / "texts.txt"), ordinary)
    assert {source.held_out for source in found} == {True, False}
    assert max(len(source.token_ids) for source in found) == 512


def test_answers_are_ordinary_decodings(ordinary: OrdinaryDecoding, sources: list[Source], tmp_path: Path) -> None:
    answering = Answering(ordinary, sources[:8], tmp_path / "answers.jsonl")
    answering.run(work(tmp_path / "work")[1], 0.5, lambda line: None)
    texts = answering.texts()
    held_out = sum(source.held_out for source in sources[:8])
    assert len(texts) == 2 * 8 - held_out
    for text in texts[:8]:
        prompt = sources[text.source].token_ids
        assert text.token_ids[: text.first] == prompt
        expected = ordinary.generate(list(prompt), SamplingParams(max_new_tokens=10, temperature=0.0)).token_ids
        assert text.token_ids[text.first :] == expected


def test_a_killed_run_loses_no_whole_answer(ordinary: OrdinaryDecoding, sources: list[Source], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    clock = work(tmp_path / "work")[1]
    Answering(ordinary, sources[:6], whole).run(clock, 0.5, lambda line: None)
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:3]) + lines[3][:5])
    again = Answering(ordinary, sources[:6], cut)
    assert len(again.texts()) == 3
    again.run(clock, 0.5, lambda line: None)
    assert cut.read_bytes() == whole.read_bytes()


def test_a_held_out_answer_and_another_are_made_however_short_the_time(
    ordinary: OrdinaryDecoding, sources: list[Source], tmp_path: Path
) -> None:
    answering = Answering(ordinary, sources, tmp_path / "answers.jsonl")
    answering.run(work(tmp_path / "work", 0.0)[1], 0.5, lambda line: None)
    assert {sources[text.source].held_out for text in answering.texts()} == {True, False}
    assert len(answering.texts()) < len(sources)


def random_texts(number: int = 12, length: int = 30) -> list[Text]:
    rows = torch.randint(1, 300, (number, length), generator=torch.Generator().manual_seed(0)).tolist()
    return [Text(source, tuple(row), 5) for source, row in enumerate(rows)]


def keep(folder: Path, ordinary: OrdinaryDecoding, texts: list[Text], layers: tuple[int, ...] = (1, 3)) -> KeptStates:
    folder.mkdir(exist_ok=True)
    kept = KeptStates(folder, layers, 32)
    for _ in read_all(kept, texts, Reader(ordinary.stage, layers), 1e9):
        pass
    return kept


def test_states_and_choices_are_the_models(folder: Path, ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    texts = random_texts()
    kept = keep(tmp_path / "states", ordinary, texts)
    assert kept.num_places == 12 * 25
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text, of_text in zip(texts, kept.texts(), strict=True):
        with torch.no_grad():
            found = library(torch.tensor([text.token_ids[:-1]]), output_hidden_states=True)
        places = slice(of_text.places.start, of_text.places.stop)
        for layer in (1, 3):
            expected = found.hidden_states[layer][0, 4:]
            torch.testing.assert_close(kept.states(layer)[places].float(), expected, rtol=0.01, atol=0.01)
        assert torch.equal(kept.choices()[places], found.logits[0, 4:].argmax(-1))


def test_what_a_killed_run_wrote_in_part_is_written_again(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    texts, place = random_texts(), tmp_path / "states"
    keep(place, ordinary, texts)
    expected = {path.name: path.read_bytes() for path in place.iterdir()}
    lines = expected["texts.jsonl"].splitlines(keepends=True)
    (place / "texts.jsonl").write_bytes(b"".join(lines[:7]) + b"[7")
    keep(place, ordinary, texts)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == expected


def test_files_keep_to_their_bound(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    kept = KeptStates(tmp_path, (1, 3), 32)
    most = 60 * kept.bytes_of_place
    assert list(read_all(kept, random_texts(), Reader(ordinary.stage, (1, 3)), most)) == [1, 2]
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix != ".jsonl") <= most


def training(folder: Path, ordinary: OrdinaryDecoding, tokens: tuple[int, ...]) -> HeadsTraining:
    kept = keep(folder.parent / "states", ordinary, random_texts(40, 60))
    labels = labels_of(kept.choices(), tokens, 300)
    end = model_end(ordinary.stage.model, tokens)
    return HeadsTraining(end, kept, kept.layers, labels, torch.nonzero(labels >= 0)[:, 0], WorkFolder(folder, {}))


def test_a_stopped_training_goes_on_where_it_ended(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    tokens, told = tuple(range(0, 300, 2)), dict[str, list[str]]()

    def trained(name: str, stop: int | None) -> HeadsTraining:
        found, told[name] = training(tmp_path / name, ordinary, tokens), []

        def tell(line: str) -> None:
            told[name].append(line)
            if len(told[name]) == stop:
                found._checkpoint.save(found.steps)
                raise KeyboardInterrupt

        found.run(Clock(WorkFolder(tmp_path / name, {}), LONG), 1.0, tell)
        return found

    whole = trained("whole", None)
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", 5)
    again = trained("stopped", None)
    assert again.steps == whole.steps == whole.num_steps
    for ours, theirs in zip(again.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    losses = [float(line.partition("loss ")[2].partition(",")[0]) for line in told["whole"]]
    assert losses[-1] < 0.9 * losses[0]


def test_the_better_kind_is_chosen(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    """A tenth of a pass' weights has to gain a tenth of the guesses."""
    affine = TriedHead(0.5, 100)
    for right, kind in ((0.65, GATED), (0.55, AFFINE), (0.6, AFFINE)):
        tried = {AFFINE: affine, GATED: TriedHead(right, 200)}
        assert choose_head(3, tried, 1000) == HeadChoice(3, kind, tried)
    tokens = tuple(range(0, 300, 2))
    learning = training(tmp_path / "work", ordinary, tokens)
    learning.run(Clock(WorkFolder(tmp_path / "work", {}), LONG), 1.0, lambda line: None)
    places = learning._places[:500]
    learning.choose(places, 10**6)
    for layer, head in learning.heads.items():
        choice, states = learning.choices[layer], learning._states[layer][places].float()
        logits = head(states[None])[0]
        right = (logits.topk(3).indices == learning._labels[places][:, None]).any(-1).float().mean()
        assert choice.tried[choice.kind].right == pytest.approx(float(right))
        assert choice.tried[choice.kind].numbers == sum(p.numel() for p in head.parameters()) * (choice.kind != OWN)
        assert all(torch.equal(p, p.bfloat16().float()) for p in head.parameters())  # as it will be saved


def test_closed_forms_end_in_time(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    """A quarter of the training's time, counted from its first begin, a later run's parts included."""
    learning, clock = training(tmp_path / "work", ordinary, (1, 2, 3)), Clock(WorkFolder(tmp_path / "clock", {}), 1.0)
    learning._clock, learning._share, learning._began = clock, 1.0, 20.0

    def read(spent: float, share: float = 1.0) -> int:
        def parts() -> Iterator[int]:
            for part in range(10):
                clock._before = spent + 2 * (part + 1)
                yield part

        return len(list(learning.in_time(parts(), share)))

    assert [read(20.0), read(20.0, 0.5), read(24.0), read(40.0)] == [5, 3, 3, 1]


def test_a_drafter_learns_what_it_will_see(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    """Each step's logits are those of a drafter that follows the certain tokens and drafts the others."""
    texts, tokens, model = random_texts(3, 20), tuple(range(0, 300, 2)), ordinary.stage.model
    kept = keep(tmp_path / "states", ordinary, texts, (4,))
    covered = labels_of(kept.choices(), tokens, 300) != OUTSIDE
    read = [drafted(text.token_ids, 5, of_text.places) for text, of_text in zip(texts, kept.texts(), strict=True)]
    learning = DrafterTraining(model, tokens, kept, covered, read[:2], WorkFolder(tmp_path / "work", {}))
    learning._clock, learning._share, learning._began = Clock(WorkFolder(tmp_path / "clock", {}), LONG), 1.0, 0.0
    learning.begin()
    assert learning.learner.mix.bias.any()
    for parameter in learning.learner.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        scores = learning.drafts.scores(read)
    drafter = Drafter(learning.learner, model, tokens, few_bits=False)
    for number, text in enumerate(read):
        assert list(text.tokens) == list(texts[number].token_ids[5:-1])
        states = kept.states(4)[text.before.start : text.before.stop, None]
        drafter.begin(30)
        for place, token in enumerate(text.tokens):
            drafter.follow([token], states[place : place + 1])
            chains = [text.tokens[place + 1 : place + 1 + own] for own in range(3)]
            for own, chain in enumerate(chains):
                if len(chain) == own:
                    expected = scores[own][number, place + own]
                    torch.testing.assert_close(drafter.draft([chain])[0], expected, rtol=1e-3, atol=1e-3)
        several = drafter.another()
        several.begin(30)
        several.follow(text.tokens, states)
        torch.testing.assert_close(several.draft([[]]), drafter.draft([[]]), rtol=1e-3, atol=1e-3)


def test_a_drafter_gains_by_its_steps(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    """Its loss falls; a stopped training goes on without another closed form."""
    texts, tokens = random_texts(16, 20), tuple(range(300))
    kept = keep(tmp_path / "states", ordinary, texts, (4,))
    covered = torch.ones(kept.num_places, dtype=torch.bool)
    read = [drafted(text.token_ids, 5, of_text.places) for text, of_text in zip(texts, kept.texts(), strict=True)]
    learning = DrafterTraining(ordinary.stage.model, tokens, kept, covered, read, WorkFolder(tmp_path / "work", {}))
    losses = list[float]()
    clock = Clock(WorkFolder(tmp_path / "clock", {}), 10.0)
    learning.num_steps = 30
    learning.run(clock, 1.0, lambda line: losses.append(float(line.partition("loss ")[2].partition(",")[0])))
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_drafter_beside_the_heads(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out, info = tmp_path / "heads", describe(str(folder))
    report = adapt(str(folder), prompts=str(prompts), layers=(1, 2, 3), drafter=True, minutes=0.05, out=out)
    check(report, out, str(folder), [1, 2, 3])
    assert len(report.greedy.drafter) == len(report.sampled.drafter) == 3
    found = describe_drafter(out / "drafter", info)
    assert len(found.tokens) == 300
    drafter = load_drafter(found, load_layers(info, 4, torch.float32, "cpu"))
    drafter.begin(4)
    drafter.follow([5], torch.zeros(1, 1, 32))
    assert drafter.draft([[], [6]]).shape == (2, 300)
    shipped = ship_parts.ship(out, info, tmp_path / "shipped")
    assert sorted(describe_heads(shipped, info)) == [1, 2, 3]
    about = json.loads((shipped / "report.json").read_text())
    assert not about.keys() & {"folder", "plan"}
    rates = [found["drafter"][0]["all"][k] for found in (about["greedy"], about["sampled"]) for k in "135"]
    row = " | ".join(["the drafter's token 1", *(f"{rate:.3f}" for rate in rates)])
    assert f"| {row} |" in (shipped / "README.md").read_text()


def test_the_bound_is_stages_over_stage_times() -> None:
    before = {1: torch.tensor([5, 5, 5, 5]), 2: torch.tensor([0, 5, 5, 5])}
    after = {1: torch.tensor([0, 0, 4, 5]), 2: torch.tensor([0, 5, 0, 5])}
    found = stages_report((1, 2), before, after)
    assert found.before[1] == pytest.approx(3 / (0.25 * 2 + 0.75 * 3))
    assert found.after[1] == pytest.approx(3 / (0.5 * 1 + 0.25 * 2 + 0.25 * 3))
    assert found.after[5] == pytest.approx(3 / (0.75 * 1 + 0.25 * 3))


def test_guesses_are_compared_with_the_choices_of_the_runtimes_sampler(
    ordinary: OrdinaryDecoding, tmp_path: Path
) -> None:
    """Greedy and sampled, as a stage ranks them: with the noise of the token's position."""
    texts, tokens, model = random_texts(4, 20), tuple(range(0, 300, 2)), ordinary.stage.model
    kept = keep(tmp_path / "states", ordinary, texts, (2, 4))
    labels, end = labels_of(kept.choices(), tokens, 300), model_end(model, tokens)
    found, hits, covers = HeldOut(model, tokens), Counter[tuple[str, int]](), Counter[str]()
    for text, of_text in zip(texts, kept.texts(), strict=True):
        rows = slice(of_text.places.start, of_text.places.stop)
        with torch.no_grad():
            guessed = FinalHead(end)(kept.states(2)[rows].float()[None])[0]
            logits = ordinary.stage.head(kept.states(4)[rows].float()[None])[0]
        sampler = Sampler(SamplingParams(temperature=1.0, seed=text.source))
        guesses = [((BEFORE, 2), guessed), ((AFTER, 2), guessed[1:])]
        found.add("of one kind", sampler, text.first, labels[rows], kept.states(4)[rows], guesses)
        for place, (row, full) in enumerate(zip(guessed, logits, strict=True)):
            history = list(text.token_ids[: text.first + place])
            everywhere = torch.full((300,), -torch.inf).index_put((torch.tensor(tokens),), row)
            for way, chooser in ((GREEDY, Sampler(SamplingParams(temperature=0.0))), (SAMPLED, sampler)):
                chosen = kept.choices()[rows][place].item() if way == GREEDY else chooser.choose(full, history)
                covers[way] += chosen in tokens
                for k in KS:
                    hits[way, k] += chosen in chooser.rank(everywhere, history, k)
    for way in (GREEDY, SAMPLED):
        comparison = found.comparison(way, [(2,)])
        (layer,) = comparison.layers
        assert layer.before["all"] == layer.before["of one kind"]
        assert layer.before["all"] == pytest.approx({k: hits[way, k] / kept.num_places for k in KS})
        assert comparison.covered == pytest.approx(covers[way] / kept.num_places)
        assert comparison.stages[0].before.keys() == set(KS)
    assert hits[GREEDY, 1] != hits[SAMPLED, 1]


def check(report: AdaptReport, out: Path, model: str, layers: list[int], earlier: list[int] | None = None) -> None:
    heads = describe_heads(out, describe(model))
    assert sorted(heads) == sorted([*layers, *(earlier or [])])
    assert [layer.layer for layer in report.greedy.layers] == layers
    assert {layer: heads[layer].kind for layer in layers} == {
        one.layer: AFFINE if one.kind == OWN else one.kind for one in report.heads
    }
    assert all({*one.tried} == {OWN, AFFINE, GATED} for one in report.heads)
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report.as_dict()))
    assert sum(report.held_out.values()) > 0
    for found in (report.greedy, report.sampled):
        assert [one.layer for one in found.layers] == layers
        assert all(bound >= 1 for stages in found.stages for bound in stages.after.values())


@pytest.mark.parametrize("weights", [None, "int8"])
def test_heads_that_stages_use(folder: Path, prompts: Path, tmp_path: Path, weights: str | None) -> None:
    out, model = tmp_path / "heads", str(folder)
    if weights:
        model = str(tmp_path / "quantised")
        quantise_model(str(folder), Path(model), weights)
    report = adapt(model, prompts=str(prompts), layers=(1, 2), minutes=0.05, out=out)
    check(report, out, model, [1, 2])
    assert sorted(path.name for path in tmp_path.glob("heads*")) == ["heads"]
    expected = OrdinaryDecoding(model).generate("the quick", max_new_tokens=12).token_ids
    with PPDRuntime(model, stages=3, exit_head=str(out), transport="local") as runtime:
        assert runtime.cuts == (1, 2)
        assert runtime.generate("the quick", max_new_tokens=12).token_ids == expected


def test_without_a_folder_stages_find_the_heads(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    for layer in (1, 2):  # the second lies beside the first
        report = adapt(str(folder), prompts=str(prompts), layers=(layer,), minutes=0.02)
        check(report, Path(report.folder), str(folder), [layer], list(range(1, layer)))
    assert "layer 1, which got no new head" in report.stayed
    assert [path.name for path in Path(report.folder).parent.iterdir()] == [Path(report.folder).name]
    with PPDRuntime(str(folder), stages=2, transport="local") as runtime:
        assert [head.exit_layer for spec in runtime._specs if (head := spec.exit_head) != "shared"] == [2]


@pytest.mark.parametrize("ship", [False, True])
def test_only_better_parts_take_the_place_of_those_that_are_there(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ship: bool
) -> None:
    """Worse ones are left, unless told to replace all; kept and shipped parts are treated alike."""

    def parts() -> dict[str, bytes]:
        return {name: (kept / name).read_bytes() for name in files}

    def spoil(self: HeadsTraining | DrafterTraining) -> None:
        own = [self._own] if isinstance(self, HeadsTraining) else []
        for parameter in itertools.chain.from_iterable(network.parameters() for network in (self.network, *own)):
            torch.nn.init.normal_(parameter, std=5.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = ["layer-1/exit_head.safetensors", "drafter/drafter.safetensors", "guess_counts.json"]
    given = {"prompts": str(prompts), "layers": (1,), "minutes": 0.1}
    kept = Path(adapt(str(folder), **given).folder)
    good = parts()
    assert describe_heads(kept, describe(str(folder)))[1].kind in (AFFINE, GATED)
    if ship:
        shipped = tmp_path / "shipped"
        monkeypatch.setattr(kept_heads, "SHIPPED", shipped)
        shipped.mkdir()
        kept.rename(shipped / kept.name)
    with monkeypatch.context() as patch:
        patch.setattr(HeadsTraining, "end", spoil)
        patch.setattr(DrafterTraining, "end", spoil)
        report = adapt(str(folder), **given)
        assert parts() == good
        assert [one.kind for one in report.heads] == [EARLIER]
        head, drafter = report.stayed
        assert head.startswith("layer 1, right in 0.")
        assert drafter.startswith("the drafter, which foresees ")
        assert json.loads((kept / "report.json").read_text())["stayed"] == [head, drafter]
        assert report.greedy.layers[0].after["all"][3] == pytest.approx(report.heads[0].tried[EARLIER].right)
        if ship:
            return
        assert adapt(str(folder), replace=True, **given).stayed == ()
        assert not parts().items() & {name: good[name] for name in files[:2]}.items()
    worse = parts()
    assert not [
        line for line in adapt(str(folder), **given).stayed if line.startswith("layer")
    ]  # a drafter needs longer
    assert parts()[files[0]] != worse[files[0]]


def test_parts_that_a_killed_run_did_not_move_are_kept(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run moves them before it begins, and alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = {"prompts": str(prompts), "layers": (2,), "minutes": 0.02}
    kept = Path(adapt(str(folder), **given).folder)
    left = kept.rename(kept.with_name(kept.name + ".new"))
    begun = left.with_name(left.name + ".unfinished")
    begun.mkdir()
    (begun / "spent.json").write_text("9999")
    with pytest.raises(ValueError, match="another run adapts it: wait, or give out"), locked(left, "taken"):
        adapt(str(folder), **given)
    assert left.is_dir()
    with pytest.raises(KeyboardInterrupt):
        adapt(str(folder), progress=next(stopping(2)), **given)
    assert describe_heads(kept, describe(str(folder)))
    assert not (begun / "spent.json").exists()
    assert not left.exists()


@pytest.mark.parametrize("given", [True, False])
def test_layouts_are_measured_with_the_parts(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    asked, told = [], list[str]()

    def measure(config: RuntimeConfig, progress: Progress, parts: str | None) -> dict[str, object]:
        progress("measuring one stage")
        asked.append(parts)
        assert (Path(parts or report_folder) / "drafter").is_dir()
        return {"found": FOUND, "cpu_share": 1.0, "plan": {"rows": [["one stage", 1.0]], "verdict": "one stage"}}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run, "_LEAST_MINUTES", 0.05)
    monkeypatch.setattr(run, "measured_layouts", measure)
    info, out = describe(str(folder)), tmp_path / "heads" if given else None
    report_folder = out or kept_heads_folder(info)
    report = adapt(
        str(folder),
        prompts=str(prompts),
        layers=(2,),
        minutes=0.05,
        out=out,
        progress=told.append,
        place={"threads": 1},
    )
    assert asked == [out and str(out)]
    assert "after the minutes, with the parts: measuring one stage" in told
    check(report, report_folder, str(folder), [2])
    assert report.plan["verdict"] == "one stage"
    kept = list((tmp_path / "ppd_runtime").glob("layout-*.json"))
    assert [json.loads(path.read_text())["found"] for path in kept] == [FOUND] * (not given)
    if not given:
        assert with_found_layout(RuntimeConfig(str(folder), layout="auto"), told.append)[0].stages == 1


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("the reason"), ": the reason"), (KeyboardInterrupt(), " to the end")]
)
def test_parts_whose_layouts_cannot_be_measured_are_whole(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(run, "_LEAST_MINUTES", 0.05)
    monkeypatch.setattr(run, "measured_layouts", fail)
    report = adapt(str(folder), prompts=str(prompts), layers=(2,), minutes=0.05, out=tmp_path / "heads")
    check(report, tmp_path / "heads", str(folder), [2])
    assert report.plan == {"verdict": f"layouts were not measured{told}"}


def stopping(after: int) -> Iterator[Callable[[str], None]]:
    """Progress that stops a run at its first line, then at its second one, and so on up to `after`."""
    for last in range(1, after):
        left = iter(range(last))

        def tell(line: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        yield tell


def test_a_run_that_is_stopped_again_and_again(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out, stopped = tmp_path / "heads", 0
    given = {"prompts": str(prompts), "stages": (2,), "minutes": 0.05, "out": out}
    for tell in stopping(12):
        try:
            adapt(str(folder), progress=tell, **given)
            break
        except KeyboardInterrupt:
            stopped += 1
            assert run.unfinished(out).is_dir()
            assert not out.exists()
    else:
        adapt(str(folder), **given)
    assert stopped > 3
    assert describe_heads(out, describe(str(folder)))
    assert not run.unfinished(out).exists()


def test_other_settings_are_refused_while_one_is_unfinished(folder: Path, prompts: Path, tmp_path: Path) -> None:
    given = {"prompts": str(prompts), "minutes": 0.05, "out": tmp_path / "heads"}
    with pytest.raises(KeyboardInterrupt):
        adapt(str(folder), progress=next(stopping(2)), layers=(2,), **given)
    with pytest.raises(ValueError, match=r"unfinished training with layers=\[2\], not \[3\]"):
        adapt(str(folder), layers=(3,), **given)
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(ValueError, match="unfinished training with other prompts or texts: go on"):
        adapt(str(folder), layers=(2,), **given)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("settings.json", "[]"),
        ("settings.json", "{"),
        ("spent.json", "null"),
        ("heads-began.json", ""),
        ("answers.jsonl", "nothing\n"),
        ("answers.jsonl", "{}\n"),
        ("answers.jsonl", "[99999, 0, [1, 2]]\n"),
        ("texts.jsonl", "[0]\n"),
        ("layer-2.bf16", ""),
    ],
)
def test_a_damaged_file_of_a_stopped_run_is_named(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    monkeypatch.setattr(work_folder, "_SAVE_EVERY_S", 0.0)

    def stop(line: str) -> None:
        if line.startswith("heads: step"):
            raise KeyboardInterrupt

    given = {"prompts": str(prompts), "minutes": 0.02, "layers": (2,), "out": tmp_path / "heads"}
    with pytest.raises(KeyboardInterrupt):
        adapt(str(folder), progress=stop, **given)
    place = run.unfinished(tmp_path / "heads")
    assert (place / name).stat().st_size, "it was written before"
    (place / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}: is damaged; delete .*heads.unfinished to begin again"):
        adapt(str(folder), **given)


def test_texts_are_read_and_not_answered(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": " ".join(WORDS[number % 5 :])} for number in range(5)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = adapt(str(folder), texts=str(tmp_path / "texts.jsonl"), minutes=0.05, out=tmp_path / "heads")
    check(report, tmp_path / "heads", str(folder), [1, 2, 3])
    assert [stages.cuts for stages in report.greedy.stages] == [(2,), (1, 2, 3)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minutes": 0}, "minutes=0: give a finite number of at least 0.01"),
        ({"disk_gb": -1}, "disk_gb=-1: give"),
        ({"prompts": "a", "texts": "b"}, "prompts and texts are both given: give one of them"),
        ({"stages": (2,), "layers": (3,)}, "stages and layers are both given: give one of them"),
        ({"replace": True}, "heads', a new folder, which replaces nothing: drop one"),
        ({"stages": (5,)}, "stages=5: with 4 layers choose 2 to 4"),
        ({"layers": (3, 2)}, "layers='3,2': with 4 layers give layers from 1 to 3"),
        ({"prompts": "FOLDER/none.jsonl"}, "none.jsonl: No such file or directory; give a file of prompts"),
        ({"prompts": ""}, ".: Is a directory; give a file of prompts"),
        ({"texts": ""}, ".: Is a directory; give a file of texts"),
        ({"out": "FOLDER/none/out"}, "none/out': give a new folder in one that exists"),
        (
            {"out": "/proc/x"},
            "out='/proc/x': nothing can be written in '/proc' (No such file or directory); give a new",
        ),
    ],
)
def test_refusals_come_before_anything_is_written(
    folder: Path, tmp_path: Path, given: dict[str, object], message: str
) -> None:
    given = {
        name: value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value
        for name, value in given.items()
    }
    out = Path(str(given.pop("out", tmp_path / "heads")))
    with pytest.raises(ValueError, match=".*") as refused:
        adapt(str(folder), out=out, **given)
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())
