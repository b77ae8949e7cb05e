"""Who is lost is replaced, some times in a row, and says why; success is forgiveness."""

import pytest

import ppd_runtime.launch.supervisor
from ppd_runtime.launch.supervisor import Supervisor
from ppd_runtime.settings.layouts import DECIDER, PaperLayout
from ppd_runtime.workers.bits import NO_BITS, Bits


class Puppet:
    """A worker that does as it is told."""

    location, cancelled, bits = "", False, NO_BITS

    def __init__(self, rank, starts="ready"):
        self.rank, self.starts, self.end, self.ended, self.serves = rank, starts, None, False, False

    def is_ready(self):
        if self.starts not in ("ready", "slowly"):
            raise RuntimeError(self.starts)
        return self.starts == "ready"

    def welcome(self):
        self.serves = True

    def end_reason(self):
        return self.end

    def wait(self, seconds):
        pass

    def kill(self):
        self.ended = True


class Stage:
    """Puppets and their supervisor."""

    def __init__(self, most_restarts=2):
        self.spawned, self.starts, self.refuses = [], "ready", None
        self.supervisor = Supervisor(PaperLayout(2, 2, 2), self._begin, most_restarts)

    def _begin(self, rank):
        if self.refuses:
            raise self.refuses
        self.spawned.append(Puppet(rank, self.starts))
        return self.spawned[-1]

    def of(self, rank):
        return [worker for worker in self.spawned if worker.rank == rank]


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setattr(ppd_runtime.launch.supervisor, "_LONGEST_PAUSE_S", 0.0)
    stage = Stage()
    stage.supervisor.start(lambda line: None)
    return stage


def test_a_lost_worker_has_a_successor_and_the_others_stay(stage, caplog):
    stage.of(1)[0].end = "signal 9 ended it"
    stage.supervisor.check()
    assert caplog.messages == ["sub-process 1 is lost, a new one takes its place: signal 9 ended it"]
    assert not stage.supervisor.is_serving(1)
    stage.supervisor.check()
    stage.supervisor.check()
    assert [len(stage.of(rank)) for rank in (DECIDER, 1, 2)] == [1, 2, 1]
    assert stage.of(1)[0].ended
    assert stage.supervisor.is_serving(1)
    assert stage.supervisor.starts(1) == 2


def test_its_own_words_are_the_reason_and_are_said_once(stage, caplog):
    stage.supervisor.note_words(1, "MemoryError: too much")
    stage.of(1)[0].end = "exit code 1"
    stage.supervisor.check()
    stage.supervisor.check()
    stage.supervisor.check()
    stage.of(1)[1].end = "exit code 1"
    stage.supervisor.check()
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["too much", "exit code 1"]


@pytest.mark.parametrize("rank", [DECIDER, 1])
def test_too_many_losses_in_a_row(stage, caplog, rank):
    for _ in range(2):
        stage.of(rank)[-1].end = "it fell"
        stage.supervisor.check()
        stage.supervisor.check()
        stage.supervisor.check()
    stage.of(rank)[-1].end = "it fell"
    if rank == DECIDER:
        with pytest.raises(RuntimeError, match="the main process failed, after 2 restarts: it fell"):
            stage.supervisor.check()
    else:
        stage.supervisor.check()
        assert caplog.messages[-1] == "sub-process 1 is lost, after 2 restarts, decoding goes on without it: it fell"
        stage.supervisor.check()
        assert len(stage.of(1)) == 3


def test_a_life_with_other_bits_is_refused_at_the_start_and_as_a_successor(monkeypatch, caplog):
    monkeypatch.setattr(ppd_runtime.launch.supervisor, "_LONGEST_PAUSE_S", 0.0)
    stage = Stage()
    monkeypatch.setattr(Puppet, "bits", Bits("a", {"head": "0"}))
    stage.supervisor.start(lambda line: None)
    monkeypatch.setattr(Puppet, "bits", Bits("b", {"head": "1"}))
    stage.of(2)[0].end = "it fell"
    for _ in range(5):
        stage.supervisor.check()
    refused = "sub-process 2 failed to start: it computes other bits than the main process (head)"
    assert [refused in message for message in caplog.messages] == [False, True, True]
    assert all(worker.ended for worker in stage.of(2))
    assert [worker.serves for worker in stage.of(2)] == [True, False, False]
    assert stage.supervisor.serving() == [DECIDER, 1]
    others = iter([Bits("a", {"head": "0"}), Bits("b", {"head": "1"})])
    monkeypatch.setattr(Puppet, "bits", property(lambda self: next(others)))
    with pytest.raises(RuntimeError, match="sub-process 1 failed to start: it computes other bits"):
        Stage().supervisor.start(lambda line: None)


def test_success_between_losses_is_forgiveness(stage):
    for _ in range(10):
        stage.of(DECIDER)[-1].end = "it fell"
        for _ in range(3):
            stage.supervisor.check()
        stage.supervisor.note_success(DECIDER)
    assert stage.supervisor.starts(DECIDER) == 11


def test_a_successor_that_cannot_start_counts_too(stage, caplog):
    stage.of(1)[0].end = "it fell"
    stage.starts = "no room"
    for _ in range(10):
        stage.supervisor.check()
    assert len(stage.of(1)) == 3
    assert (
        "after 2 restarts, decoding goes on without it: sub-process 1 failed to start: no room" in caplog.messages[-1]
    )


def test_a_successor_that_was_cancelled_belongs_to_the_loss_before_it_once(stage, caplog):
    for _ in range(2):
        stage.of(1)[-1].end = "its node is lost"
        stage.supervisor.check()
        stage.starts = "the actor never ran"
        stage.supervisor.check()
        stage.of(1)[-1].cancelled = True
        stage.supervisor.check()
        stage.starts = "ready"
        for _ in range(2):
            stage.supervisor.check()
        assert stage.supervisor.is_serving(1)
    stage.of(1)[-1].end = "it fell"
    stage.supervisor.check()
    assert "after 2 restarts, decoding goes on without it: it fell" in caplog.messages[-1]
    assert len(stage.of(1)) == 5


def test_successors_that_are_cancelled_again_and_again_are_too_many(stage):
    stage.of(1)[0].end = "its node is lost"
    stage.starts = "the actor never ran"
    for _ in range(20):
        stage.supervisor.check()
        stage.of(1)[-1].cancelled = True
    assert len(stage.of(1)) == 5, "one more for each of three losses, less the one that was given up"


def test_a_pause_before_the_third_start(monkeypatch, stage):
    monkeypatch.setattr(ppd_runtime.launch.supervisor, "_LONGEST_PAUSE_S", 60.0)
    for _ in range(2):
        stage.of(1)[-1].end = "it fell"
        for _ in range(5):
            stage.supervisor.check()
    assert len(stage.of(1)) == 2


def test_one_that_is_too_slow_to_start_is_named(monkeypatch):
    stage = Stage()
    stage.starts = "slowly"
    monkeypatch.setattr(ppd_runtime.launch.supervisor, "START_DEADLINE_S", 0.05)
    with pytest.raises(TimeoutError, match="the main process, sub-process 1, sub-process 2 did not start within"):
        stage.supervisor.start(lambda line: None)


def test_nobody_waits_for_a_silent_one_until_it_speaks(stage):
    stage.supervisor.note_silence(2)
    assert stage.supervisor.expected() == [DECIDER, 1]
    stage.supervisor.note_success(2)
    assert stage.supervisor.expected() == [DECIDER, 1, 2]


def test_everybody_is_ended_though_the_waiting_is_interrupted(stage, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(stage.of(1)[0]), "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stage.supervisor.stop(0.1)
    assert all(worker.ended for worker in stage.spawned)


def test_a_life_that_the_system_refuses_is_a_loss(stage, caplog):
    stage.of(1)[0].end = "it fell"
    stage.supervisor.check()
    stage.refuses = BlockingIOError(11, "Resource temporarily unavailable")
    for _ in range(10):
        stage.supervisor.check()
    words = "decoding goes on without it: sub-process 1 cannot be started: BlockingIOError: [Errno 11] Resource temp"
    assert words in caplog.messages[-1]
    assert stage.supervisor.serving() == [DECIDER, 2]


def test_nobody_is_looked_after_once_all_are_dismissed(stage):
    stage.of(1)[0].end = "it fell"
    stage.supervisor.dismiss()
    with pytest.raises(RuntimeError, match="the runtime is closed"):
        stage.supervisor.check()
    assert len(stage.of(1)) == 1
