"""Judge a timing on a simulated device that works asynchronously."""

from evals_grading import Work, point


def timed(seconds, pending, warm_up, slow):
    """Time a step that launches two kernels, on a device that may have work to do already."""
    from device import Device
    from timing import time_step

    device, count = Device(), [0]

    def step():
        count[0] += 1
        cold = warm_up if count[0] <= 3 else 0.0
        once = slow if count[0] == 7 else 0.0
        device.launch(seconds / 2)
        device.launch(seconds / 2 + cold + once)

    device.launch(pending)
    return time_step(step, device, calls=11)


def assert_time(measured, required):
    assert abs(measured / required - 1) < 0.01, f"{measured:.6f} s instead of {required:.6f} s"


@point(2)
def waits_for_the_device(work: Work) -> None:
    """Steps of 5 ms and of 20 ms measure as such."""
    for seconds in (0.005, 0.02):
        assert_time(work.call(timed, seconds, 0.0, 0.0, 0.0), seconds)


@point(2)
def pending_work_is_not_counted(work: Work) -> None:
    """The same with a second of work in the queue before."""
    assert_time(work.call(timed, 0.005, 1.0, 0.0, 0.0), 0.005)


@point(2)
def first_calls_are_not_counted(work: Work) -> None:
    """The same where the first three calls take two seconds more."""
    assert_time(work.call(timed, 0.005, 0.0, 2.0, 0.0), 0.005)


@point(1)
def single_slow_call_does_not_matter(work: Work) -> None:
    """The same where one later call takes a second more."""
    assert_time(work.call(timed, 0.005, 0.5, 2.0, 1.0), 0.005)
