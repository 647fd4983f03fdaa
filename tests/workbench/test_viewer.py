"""The viewer thread: its budget of CPU time, its messages, and its end."""

import gc
import random
import threading
import time

from kvscope.workbench.viewer import BURST, CPU_SHARE, PERIOD, Pace, Viewer


def test_over_any_long_time_the_share_of_cpu_is_kept():
    choice = random.Random(3)
    for mean in (0.0005, 0.004, 0.03):
        pace, now, spent = Pace(), 0.0, 0.0
        largest = 0.0
        while now < 300:
            cost = choice.uniform(0, 2 * mean)
            spent, largest = spent + cost, max(largest, cost)
            now += cost
            now += pace.spent(cost, now)
        assert spent <= CPU_SHARE * now + BURST + largest
        if mean < CPU_SHARE * PERIOD:
            assert now / 300 < 1.01  # cheap ticks come at the full rate


def test_a_costly_tick_is_paid_back_and_then_the_rate_recovers():
    pace = Pace()
    assert pace.spent(0.001, 0.0) == PERIOD
    wait = pace.spent(0.5, 0.1)
    owed = (0.501 - BURST) / CPU_SHARE
    assert 0.95 * owed < wait <= owed
    assert pace.spent(0.001, 0.1 + wait + 6) == PERIOD


class Owner:
    def __init__(self):
        self.ticks, self.obeyed, self.threads = 0, [], set()

    def tick(self):
        self.ticks += 1
        self.threads.add(threading.current_thread().name)

    def obey(self, *message):
        self.obeyed.append(message)


def wait_for(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_messages_are_obeyed_in_order_on_the_thread_that_ticks():
    owner = Owner()
    viewer = Viewer(owner, Owner.tick, Owner.obey, lambda owner: None)
    for number in range(50):
        viewer.post("message", number)
    wait_for(lambda: len(owner.obeyed) == 50 and owner.ticks > 2)
    assert owner.obeyed == [("message", n) for n in range(50)]
    assert owner.threads == {viewer.thread.name}
    viewer.stop(wait=True)
    assert not viewer.thread.is_alive()
    viewer.stop(wait=True)


def test_in_a_long_wait_the_page_hears_that_python_lives():
    owner, beats = Owner(), []

    def dear(owner):
        owner.tick()
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    viewer = Viewer(owner, dear, Owner.obey, lambda owner: beats.append(owner.ticks))
    wait_for(lambda: len(beats) >= 2, 10)
    assert owner.ticks <= 2
    viewer.stop(wait=True)


def test_it_ends_with_its_owner():
    owner = Owner()
    viewer = Viewer(owner, Owner.tick, Owner.obey, lambda owner: None)
    while not owner.ticks:
        time.sleep(0.01)
    del owner
    gc.collect()
    viewer.thread.join(5)
    assert not viewer.thread.is_alive()


def test_what_is_spent_while_the_engine_rests_is_not_paid_back():
    pace = Pace()
    pace.spent(0.0, 0.0)
    pace.forgive(0.5)
    assert pace.spent(0.51, 1.0) == PERIOD, "a click right after it is followed at once"
    assert pace.spent(0.5, 2.0) > 10, "forgiven once"
