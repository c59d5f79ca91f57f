"""Interruptions wait until a block, or a step, has ended."""

import signal
import threading
import time

import pytest
from interrupting import default_handler

from l2lopt.core.interrupts import interrupted_after, interrupted_between_steps


@pytest.fixture(autouse=True)
def python_s_own_handler():
    with default_handler():
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt():
    signal.raise_signal(signal.SIGINT)


def interrupted(block, *given):
    """What `block(*given)` had said before an interruption ended it."""
    said = []
    with pytest.raises(KeyboardInterrupt):
        block(said.append, *given)
    return said


def test_an_interruption_waits_for_the_end_of_the_block():
    def block(say):
        with interrupted_after():
            interrupt()
            say("after")

    assert interrupted(block) == ["after"]


def test_an_interruption_waits_for_the_end_of_the_step():
    def block(say):
        with interrupted_between_steps(patience=60) as step_ended:
            step_ended()
            interrupt()
            say("after")
            step_ended()
            say("too late")

    assert interrupted(block) == ["after"]


def test_a_block_within_a_step_hands_its_interruption_on():
    def block(say):
        with interrupted_between_steps(patience=60) as step_ended:
            with interrupted_after():
                interrupt()
            say("after")
            step_ended()

    assert interrupted(block) == ["after"]


def test_a_second_interruption_does_not_wait():
    def block(say):
        with interrupted_between_steps(patience=60):
            interrupt()
            say("first")
            interrupt()
            say("second")

    assert interrupted(block) == ["first"]


def test_a_step_that_does_not_end_is_interrupted_after_all():
    def block(say):
        with interrupted_between_steps(patience=0.05):
            interrupt()
            for _ in range(600):
                time.sleep(0.1)
            say("nothing came in a minute")

    assert interrupted(block) == []


def test_an_interruption_after_the_last_step_comes_at_the_end_of_the_block():
    def block(say):
        with interrupted_between_steps(patience=60) as step_ended:
            step_ended()
            interrupt()
            say("after")
        say("too late")

    assert interrupted(block) == ["after"]


def test_a_block_that_ends_in_time_is_not_interrupted_a_second_time():
    with pytest.raises(KeyboardInterrupt), interrupted_between_steps(patience=0.1):
        interrupt()
    time.sleep(0.3)


def test_the_error_of_a_block_is_not_replaced():
    def block():
        with interrupted_between_steps(patience=60):
            interrupt()
            raise ValueError("the block's own")

    with pytest.raises(ValueError, match="the block's own"):
        block()


@pytest.mark.parametrize("block", [interrupted_after, interrupted_between_steps])
def test_other_threads_get_no_handler(block):
    failed = []

    def write():
        try:
            with block():
                pass
        except ValueError as error:  # `signal.signal` outside the main thread
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert not failed


def test_a_job_in_the_background_passes_interruptions_over():
    """A shell starts it with the signal ignored, and Ctrl-C is for what runs in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupted_after():
            interrupt()
        with interrupted_between_steps() as step_ended:
            interrupt()
            step_ended()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
