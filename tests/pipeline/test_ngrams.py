"""Boundary 0: what followed the same tokens before."""

from ppd_runtime.pipeline.staged.chances import GuessRecord
from ppd_runtime.pipeline.staged.ngrams import Repetitions


def test_the_longest_repetition_says_what_follows():
    history = [1, 2, 3, 9, 2, 3, 7, 1, 2, 3]
    repetitions = Repetitions()
    repetitions.follow(history)
    token, chance = repetitions.guess(history)
    assert token == 9, "1, 2, 3 stood before 9, only 2, 3 before 7"
    assert repetitions.guess([5, 2, 3])[0] == 7, "the newest place counts"
    assert repetitions.guess([5, 2, 3])[1] < chance
    assert repetitions.guess([8, 8]) is None
    assert repetitions.guess([3]) is None


def test_it_grows_with_the_text_and_forgets_another():
    history = [1, 2, 3]
    repetitions = Repetitions()
    repetitions.follow(history)
    assert repetitions.guess([1, 2])[0] == 3
    assert repetitions.guess([2, 3]) is None, "nothing has followed yet"
    history += [4, 1, 2]
    repetitions.follow(history)
    assert repetitions.guess([2, 3])[0] == 4
    repetitions.follow([6, 6, 6])
    assert repetitions.guess([1, 2]) is None
    assert repetitions.guess([6, 6])[0] == 6


def test_each_length_of_a_match_has_an_experience_of_its_own():
    repetitions, calibration = Repetitions(), GuessRecord()
    repetitions.follow([1, 2, 3, 4, 5, 6, 7, 8])
    guesses = {size: repetitions.guess([0, *range(8 - size, 8)]) for size in range(2, 8)}
    for wrong, guess in guesses.items():
        for _ in range(40):
            calibration.learn(0, [guess], 9)
        for size, (_, said) in guesses.items():
            chance = calibration.chance(0, 0, said)
            assert chance < 0.1 if size <= wrong else chance == said
