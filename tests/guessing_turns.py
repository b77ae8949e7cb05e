"""Guesses and rests in turn, whatever that takes."""

from dataclasses import dataclass

from ppd_runtime.pipeline.speculation_policy import Guessing


@dataclass
class TakesTurns:
    """A policy that has `guesses` tokens guessed and then `rests` tokens not, over and over."""

    guesses: int
    rests: int
    now: int = 0

    @property
    def guessing(self) -> Guessing:
        return Guessing.EXITS if self.now < self.guesses else Guessing.NOTHING

    def begin(self) -> None:
        pass

    def note(self, length: int) -> None:
        self.now = (self.now + 1) % (self.guesses + self.rests)

    def together(self, requests: int) -> None:
        pass

    def way_seconds(self, length: float) -> tuple[float, ...]:
        return ()

    def one_process(self, length: float) -> None:
        pass
