"""The scheduler and a plain re-statement of its rules agree in every step of random days, for every policy."""

import random

import pytest
from fake_model import greedy, make_core
from kvscope.engine.config import _CHOICES
from simulator import Job, Simulator

POLICIES = _CHOICES["scheduling_policy"]
CACHE_AWARE = ("lpm", "dfs-weight")


def options_of(policy, dice):
    cached = policy in CACHE_AWARE
    options = {
        "scheduling_policy": policy,
        "block_size": dice.choice([4, 8]) if cached else dice.choice([1, 2, 3, 4]),
        "num_blocks": 5000 if cached else dice.randint(5, 16),
        "max_num_seqs": dice.randint(1, 5),
        "max_num_batched_tokens": dice.choice([1, 3, 8, 40]),
        "watermark": dice.choice([0.0, 0.1, 0.3]),
        "enable_prefix_caching": cached,
        "max_skips": dice.choice([0, 0, 1, 3]),
        "long_prefill_token_threshold": dice.choice([0, 0, 2, 5]),
        "preemption_victim": dice.choice(_CHOICES["preemption_victim"]),
        "max_preemptions": dice.choice([0, 1, 3]),
        "num_cpu_blocks": dice.choice([0, 0, 2, 8, 40]),
        "resume_order": "oldest" if policy == "priority" else dice.choice(["oldest", "smallest"]),
    }
    return options | ({"preemption_mode": "swap"} if options["num_cpu_blocks"] else {})


def a_day(policy, seed):
    """Random requests, cancels and preemptions; returns how many preemptions and steps there were."""
    dice = random.Random(f"{policy} {seed}")
    options = options_of(policy, dice)
    core, sim, preempted = make_core(**options), Simulator(options), 0
    starts = [[dice.randrange(97) for _ in range(90)] for _ in range(3)]
    jobs, arrivals = {}, dice.randint(5, 18)
    while core.has_work or len(jobs) < arrivals:
        while len(jobs) < arrivals and dice.random() < 0.5:
            room = (options["num_blocks"] - 1) * options["block_size"]
            output = dice.randint(1, min(16, room))
            length = dice.randint(1, 100 if policy in CACHE_AWARE else min(40, room + 1 - output))
            text = (starts[dice.randrange(3)] + [dice.randrange(97) for _ in range(40)])[-length:]
            if policy in CACHE_AWARE:
                keep = dice.choice([0, 30, 60, 90])
                text = (starts[dice.randrange(3)][:keep] + [dice.randrange(97) for _ in range(40)])[:length]
            priority = dice.randint(0, 3)
            uses = policy == "priority" or options["preemption_victim"] == "lowest-priority"
            job = Job(len(jobs) + 1, text, output, priority if uses else 0)
            jobs[job.id] = job
            assert core.add_request(text, greedy(output, ignore_eos=True), priority=job.priority) == job.id
            sim.line.append(job)
        if dice.random() < 0.05 and (live := [job for job in jobs.values() if job in sim.line + sim.running]):
            job = dice.choice(live)
            if dice.random() < 0.5:
                core.cancel(job.id)
                (sim.line if job in sim.line else sim.running).remove(job)
            else:
                assert core.preempt(job.id) == (job in sim.running)
                if job in sim.running:
                    sim.preempt(job)
        if not core.has_work:
            continue
        expected, output = sim.step(), core.step()
        preempted += len(output.preempted)
        where = f"{policy}, seed {seed}, step {output.step}, {options}"
        assert output.scheduled == expected.scheduled, where
        assert output.preempted == list(dict.fromkeys(expected.preempted)), where
        assert sorted(output.finished) == sorted(expected.finished), where
        assert {s.request.id for s in core.scheduler.running} == {job.id for job in sim.running}, where
        assert {s.request.id for s in core.scheduler.waiting} == {job.id for job in sim.line}, where
        head = core.scheduler.waiting.head
        if head is not None and policy not in CACHE_AWARE:
            assert head.blocked.cause == expected.why, where
        assert core.scheduler.swap.num_used == sum(job.parked for job in sim.line), where
        if not options["enable_prefix_caching"]:
            assert core.tables.pool.num_free == sim.free(), where
    return preempted, core.journal.step


def days(policy, seeds):
    preempted, steps = map(sum, zip(*(a_day(policy, seed) for seed in seeds), strict=True))
    assert steps > 20 * len(seeds) and (policy in CACHE_AWARE or preempted > len(seeds) / 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_scheduler_does_what_the_rules_say(policy):
    days(policy, range(30))


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_the_scheduler_does_what_the_rules_say_on_many_days(policy):
    days(policy, range(30, 300))
