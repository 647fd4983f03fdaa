"""Serve jobs that come at their times with an engine that is stepped from outside. Standard library only."""

import time


def open_loop(jobs, submit, step):
    """When each token of each job came, in seconds from the start: [[seconds]].

    `jobs`: [(seconds, prompt, new tokens)] in the order of their times. `submit(i, prompt, new_tokens)` hands job i over once its
    time has come; `step()` computes one step and returns {i: (new tokens, whether job i is over)}.
    """
    start = time.perf_counter()
    times = [[] for _ in jobs]
    waiting, running = list(range(len(jobs))), set()
    while waiting or running:
        now = time.perf_counter() - start
        while waiting and jobs[waiting[0]][0] <= now:
            i = waiting.pop(0)
            submit(i, *jobs[i][1:])
            running.add(i)
        if not running:
            time.sleep(jobs[waiting[0]][0] - now)
            continue
        came = step()
        now = time.perf_counter() - start
        for i, (count, is_over) in came.items():
            times[i] += [now] * count
            if is_over:
                running.discard(i)
    return times
