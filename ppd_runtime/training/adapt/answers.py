"""The model's own answers to prompts, several at a time, each in the file as soon as it is whole."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.config import IN_PROCESS_SETTINGS
from ppd_runtime.text import StopRule
from ppd_runtime.training.adapt.sources import ANSWER_TOKENS, Source
from ppd_runtime.training.adapt.work_folder import Clock, Progress, damaged, in_words, whole_lines

_MOST_DECODERS = 8
ROUNDS = 10
"""Answers to a prompt at the most: the first is greedy, the others are sampled. Held-out prompts have the first."""
_NODES = 8  # rows that `TreeRange` tries at its start


@dataclass(frozen=True)
class Text:
    """A text to learn from, or to compare on."""

    source: int
    """The number of its prompt."""
    token_ids: tuple[int, ...]
    first: int
    """Tokens before the first that the model chose."""


class Answering:
    """Has a model answer prompts, and keeps the answers in a file: a later run goes on where an earlier one ended.

    Args:
        ordinary: the model.
        sources: the prompts.
        file: JSON Lines, one answer each, in the order of their ends.
    """

    def __init__(self, ordinary: OrdinaryDecoding, sources: Sequence[Source], file: Path) -> None:
        self._ordinary, self._sources, self._file = ordinary, sources, file
        self._turn, self._stopped = threading.Lock(), False
        self._answers: list[tuple[int, int, list[int]]] = [tuple(line) for line in whole_lines(file, 3)]
        if not all(number in range(len(sources)) for number, *_ in self._answers):
            raise damaged(file)

    def texts(self) -> list[Text]:
        """The answers so far, each behind its prompt."""
        found = ((number, self._sources[number].token_ids, answer) for number, _, answer in self._answers)
        return [Text(number, (*prompt, *answer), len(prompt)) for number, prompt, answer in found]

    def run(self, clock: Clock, share: float, progress: Progress) -> None:
        """Answer until `share` of the time is over; a held-out answer and another one are made in any case."""
        known = {(number, turn) for number, turn, _ in self._answers}
        asked = [pair for pair in self._all_asked() if pair not in known]
        if not asked or self._is_over(clock, share):
            return
        waiting, decoders = iter(asked), list(_decoders(self._ordinary))
        for one in decoders:  # compilers cannot run in several threads of a process
            one.stage.compile_for(PassKind.SEVERAL)
        threads = max(1, self._ordinary.config.threads_per_worker // len(decoders))
        with ThreadPoolExecutor(len(decoders), "ppd-answers") as pool:
            turns = [pool.submit(self._answer, one, threads, waiting, clock, share, progress) for one in decoders]
            try:
                for turn in as_completed(turns):
                    turn.result()
            except BaseException:
                self._stopped = True
                raise

    @torch.inference_mode()
    def _answer(
        self,
        decoder: OrdinaryDecoding,
        threads: int,
        waiting: Iterator[tuple[int, int]],
        clock: Clock,
        share: float,
        progress: Progress,
    ) -> None:
        """Answer waiting prompts, several in a pass where that is possible, until none is left or the time is over."""
        torch.set_num_threads(threads)
        rows, running = TreeRange(decoder.stage, _NODES), list[_Answer]()
        free = [rows, *(rows.another() for _ in range(1, rows.most_together if rows.joins_requests else 1))]
        while not self._is_over(clock, share):
            while free and (pair := self._next(waiting)) is not None:
                running.append(_Answer(decoder, self._sources[pair[0]], free.pop(), *pair))
            if not running:
                return
            _step(rows, running)
            for answer in [answer for answer in running if answer.is_over]:
                self._keep(answer)
                running.remove(answer)
                free.append(answer.rows)
                self._tell(clock, share, progress)
        for answer in running:
            self._keep(answer)

    def _next(self, waiting: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        with self._turn:
            return next(waiting, None)

    def _all_asked(self) -> Iterator[tuple[int, int]]:
        """Prompts by their numbers, and the number of the answer."""
        for turn in range(ROUNDS):
            yield from ((number, turn) for number, source in enumerate(self._sources) if not (turn and source.held_out))

    def _is_over(self, clock: Clock, share: float) -> bool:
        if self._stopped:
            return True
        enough = len({self._sources[number].held_out for number, *_ in self._answers}) == 2
        return enough and not clock.left(share)

    def _keep(self, answer: "_Answer") -> None:
        line = (answer.number, answer.turn, answer.new_tokens)
        with self._turn:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._answers.append(line)

    def _tell(self, clock: Clock, share: float, progress: Progress) -> None:
        with self._turn:
            tokens = sum(len(answer) for *_, answer in self._answers)
            progress(f"answers: {len(self._answers)}, {tokens} tokens, at most {in_words(clock.left(share))}")


def _decoders(ordinary: OrdinaryDecoding) -> Iterator[OrdinaryDecoding]:
    """The model, and the same again for each further thread if passes are compiled, which use a core each.

    They share the memory of the weights.
    """
    yield ordinary
    config, is_compiled = ordinary.config, ordinary.stage.device.type == "cpu" and ordinary.config.compile
    settings = {name: getattr(config, own) for name, own in IN_PROCESS_SETTINGS.items()}
    for _ in range(1, min(_MOST_DECODERS, config.threads_per_worker) if is_compiled else 1):
        yield OrdinaryDecoding(**settings)


class _Answer:
    """An answer in progress, over rows of its own."""

    def __init__(self, ordinary: OrdinaryDecoding, source: Source, rows: TreeRange, number: int, turn: int) -> None:
        self.rows, self.number, self.turn, self._prompt = rows, number, turn, list(source.token_ids)
        most = min(ANSWER_TOKENS, (ordinary.info.max_positions or 2**30) - len(self._prompt))
        asked = SamplingParams(max_new_tokens=most, temperature=1.0 if turn else 0.0, seed=turn)
        params = ordinary.chat_params(ordinary.settled(asked))
        self._sampler = Sampler(params, len(self._prompt), ordinary.info.eos_token_ids)
        self._stop = StopRule(params, ordinary.info.eos_token_ids, ordinary.tokenizer, self._prompt)
        self.new_tokens: list[int] = []
        self.is_over = False
        rows.begin(len(self._prompt) + most)
        for chunk in rows.prompt_chunks(len(self._prompt)):
            hidden = rows.run_prompt(self._prompt[chunk.start : chunk.stop], chunk.start)
        self.take(rows.logits(hidden))

    @property
    def node(self) -> int:
        """The newest token's number in the rows."""
        return len(self.new_tokens)

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token by full depth's logits, `[vocab_size]`."""
        token = self._sampler.choose(logits, [*self._prompt, *self.new_tokens])
        self.new_tokens.append(token)
        self.is_over = self._stop.finish_reason(token) is not None


def _step(rows: TreeRange, running: Sequence[_Answer]) -> None:
    """One more token for each answer, in one pass where that is possible."""
    going_on = [answer for answer in running if not answer.is_over]
    if not going_on:
        return
    hidden = rows.run_together([(one.rows, one.new_tokens[-1:], [[one.node]]) for one in going_on])
    for answer in going_on:
        answer.rows.keep(answer.node)
    states = [(answer.rows, of_one) for answer, of_one in zip(going_on, hidden, strict=True)]
    for answer, logits in zip(going_on, rows.logits_together(states), strict=True):
        answer.take(logits)
