"""core_context.preempt: modes, and what SIGTERM and SIGINT do to a run."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from determined import core, errors, tracking

OnlyTrial = Callable[[], tracking.TrialRecord]
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("mode", core.PreemptMode)
def test_nothing_asks_to_stop_at_first(mode: core.PreemptMode) -> None:
    with core.init(preempt_mode=mode) as context:
        assert context.preempt.should_preempt() is False


class Run:
    """A run that gets signals, asks whether to stop, and then does something else."""

    def __init__(self, *signals: signal.Signals, then: BaseException | None = None, **options: Any) -> None:
        self.signals = signals
        self.then = then
        self.options = options
        self.answers: list[bool] = []

    def __call__(self) -> None:
        with core.init(**self.options) as context:
            context.preempt.should_preempt()  # who never asks is ended by a signal as any program
            for which in self.signals:
                signal.raise_signal(which)
            self.answers = [context.preempt.should_preempt(auto_ack=False) for _ in range(2)]
            context.preempt.acknowledge_preemption_signal()
            if self.then is not None:
                raise self.then


@pytest.mark.parametrize("mode", core.PreemptMode)
@pytest.mark.parametrize("which", SIGNALS)
def test_signal_asks_to_stop_for_good(which: signal.Signals, mode: core.PreemptMode) -> None:
    run = Run(which, preempt_mode=mode)
    with pytest.raises(SystemExit):
        run()
    assert run.answers == [True, True]


def test_asking_off_the_chief_is_refused_in_chief_only_mode() -> None:
    class Worker(core.DistributedContext):
        is_chief = False  # type: ignore[assignment]

    worker = Worker.single()
    with (
        core.init(distributed=worker, preempt_mode=core.PreemptMode.ChiefOnly) as context,
        pytest.raises(errors.WrongRankError, match="only the chief may ask"),
    ):
        context.preempt.should_preempt()


@pytest.mark.parametrize("which", SIGNALS)
def test_signal_ends_the_block_with_the_status_of_shells(which: signal.Signals) -> None:
    with pytest.raises(SystemExit) as caught:
        Run(which)()
    assert caught.value.code == 128 + which


@pytest.mark.parametrize("which", SIGNALS)
def test_signaled_run_is_canceled(which: signal.Signals, only_trial: OnlyTrial) -> None:
    with pytest.raises(SystemExit):
        Run(which)()
    assert (only_trial().state, only_trial().reason) == (tracking.RunState.CANCELED, f"signal {int(which)}")


def test_program_that_exits_by_itself_after_a_signal_is_canceled(only_trial: OnlyTrial) -> None:
    with pytest.raises(SystemExit) as caught:
        Run(signal.SIGTERM, then=SystemExit(0))()
    assert caught.value.code == 0
    assert only_trial().state is tracking.RunState.CANCELED


def test_exception_after_a_signal_stays_an_error(only_trial: OnlyTrial) -> None:
    with pytest.raises(ZeroDivisionError):
        Run(signal.SIGTERM, then=ZeroDivisionError())()
    assert only_trial().state is tracking.RunState.ERROR


@pytest.mark.parametrize("first", SIGNALS)
def test_interrupt_after_a_signal_interrupts_at_once(first: signal.Signals, only_trial: OnlyTrial) -> None:
    run = Run(first, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run.answers == []
    assert only_trial().state is tracking.RunState.CANCELED


def test_second_sigterm_is_still_polite() -> None:
    run = Run(signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(SystemExit):
        run()
    assert run.answers == [True, True]


def test_context_works_off_the_main_thread(only_trial: OnlyTrial) -> None:
    before = [signal.getsignal(which) for which in SIGNALS]
    during: list[Any] = []

    def train() -> None:
        with core.init() as context:
            context.train.set_status("on a thread")
            during.extend(signal.getsignal(which) for which in SIGNALS)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(timeout=60)
    assert during == before
    assert only_trial().status == "on a thread"
    assert only_trial().state is tracking.RunState.COMPLETED


@pytest.mark.parametrize("which", SIGNALS)
def test_process_that_was_signaled_has_the_status_of_shells(
    which: signal.Signals, run_program: Callable[..., Any]
) -> None:
    done = run_program(
        "import os, signal\n"
        "from determined import core\n"
        "with core.init() as context:\n"
        "    context.preempt.should_preempt()\n"
        f"    os.kill(os.getpid(), {int(which)})\n"
        "    while not context.preempt.should_preempt():\n"
        "        pass\n"
        "    print('saved')\n"
        "print('went on')\n"
    )
    assert (done.returncode, done.stdout) == (128 + which, "saved\n"), done.stderr


def _wait_to_be_ended(ready: Any) -> None:
    ready.set()
    time.sleep(60)


# Forking with a thread alive is what is tested; newer Pythons warn about it.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_can_be_terminated() -> None:
    forking = multiprocessing.get_context("fork")
    with core.init() as context:
        ready = forking.Event()
        child = forking.Process(target=_wait_to_be_ended, args=(ready,))
        child.start()
        assert ready.wait(30)
        child.terminate()
        child.join(30)
        try:
            assert child.exitcode == -signal.SIGTERM
        finally:
            child.kill()
        assert not context.preempt.should_preempt()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_survives_the_first_interrupt_of_its_terminal() -> None:
    forking = multiprocessing.get_context("fork")
    with core.init():
        child = forking.Process(target=signal.raise_signal, args=(signal.SIGINT,))
        child.start()
        child.join(30)
        assert child.exitcode == 0


def test_program_that_never_asks_is_interrupted_as_any_other() -> None:
    with pytest.raises(KeyboardInterrupt), core.init():
        signal.raise_signal(signal.SIGINT)
