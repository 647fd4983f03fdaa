"""The recording that comes with kvscope: sixteen requests on a small pool, where blocks are shared, copied, evicted, and fought for.

    python -m kvscope.engine.recording.demo            # runs it on the default model and writes demo.kvscope beside this file

Arrivals are at steps, sampling is seeded and the engine is stepped, so that every run of it tells the same story.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from .recording import DEMO, Recording

OPTIONS: dict[str, Any] = {
    "num_blocks": 52, "block_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 128, "dtype": "float32", "seed": 0,
}  # fmt: skip
MAX_STEPS = 400

_TEACHER = (
    "You are a careful teaching assistant for a course on operating systems. Answer in short sentences, name every term before "
    "you use it, and close with one example that a student can check with pencil and paper. "
)
_REPORT = (
    "Meeting notes of the reading room. The heating fails on the third floor, and the librarians want lamps with warmer light. "
    "The catalogue moves to a new machine in May; until then nobody should add books by hand. Two volunteers repair atlases. "
    "The cat that lives between the shelves of history and geography is called Index, and visitors feed it too much. "
    "Opening hours stay as they are, but on Thursdays the doors close at nine so that the choir can practise. "
    "The roof was inspected after the storm: four tiles are missing above the map collection, and a bucket stands there. "
    "A school class comes every second Monday; they want to see how a press works, and the old one still prints. "
)


class Arrival(NamedTuple):
    step: int
    question: str
    options: dict[str, Any]
    beams: bool = False


ARRIVALS: tuple[Arrival, ...] = (
    Arrival(0, _TEACHER + "What is a page table?", {"max_tokens": 72, "temperature": 0.0, "logprobs": 3}),
    Arrival(4, "Name three animals that sleep through the winter.", {"max_tokens": 48, "temperature": 0.0}),
    Arrival(9, "Write the first line of a story about a lighthouse.", {"n": 4, "temperature": 1.0, "max_tokens": 56, "seed": 3}),
    Arrival(26, _TEACHER + "What is a page fault?", {"max_tokens": 80, "temperature": 0.0}),
    Arrival(34, _REPORT + "Sum this up in two sentences.", {"max_tokens": 64, "temperature": 0.0}),
    Arrival(48, "Why is the sky blue?", {"beam_width": 3, "max_tokens": 32}, beams=True),
    Arrival(60, _TEACHER + "What does copy-on-write save?", {"max_tokens": 96, "temperature": 0.0, "logprobs": 3}),
    Arrival(72, "Explain to a child how a bicycle stays upright.", {"n": 3, "temperature": 0.9, "max_tokens": 88, "seed": 8}),
    Arrival(84, _REPORT + "Who feeds the cat, and what is it called?", {"max_tokens": 56, "temperature": 0.0}),
    Arrival(96, "Tell a short story about a slow river.", {"temperature": 0.8, "max_tokens": 140, "seed": 10}),
    Arrival(104, "Tell a short story about a paper boat.", {"n": 4, "temperature": 0.8, "max_tokens": 110, "seed": 11}),
    Arrival(112, _REPORT + "What is missing on the roof?", {"n": 2, "temperature": 0.7, "max_tokens": 90, "seed": 12}),
    Arrival(150, "List five words that rhyme with light.", {"max_tokens": 40, "temperature": 0.0}),
    Arrival(186, _TEACHER + "What is a page table?", {"max_tokens": 64, "temperature": 0.6, "seed": 14, "logprobs": 3}),
    Arrival(198, _REPORT + "When do the doors close on Thursdays?", {"max_tokens": 48, "temperature": 0.0}),
    Arrival(212, "Give one reason to read old books.", {"max_tokens": 72, "temperature": 0.0}),
)  # fmt: skip


def record(model: str = "default", **options: Any) -> Recording:
    """Run it; seconds to a minute on the default model."""
    from kvscope.engine import BeamSearchParams, Engine, SamplingParams

    with Engine(model, **(OPTIONS | options)) as engine:
        engine.pause()
        tape, coming = engine.record(), list(ARRIVALS)
        for step in range(MAX_STEPS):
            while coming and coming[0].step <= step:
                _, question, sampling, beams = coming.pop(0)
                chat = bool(getattr(engine.tokenizer, "chat_template", None))
                params = BeamSearchParams(**sampling) if beams else SamplingParams(**sampling)
                engine.submit([{"role": "user", "content": question}] if chat else question, params)
            if not coming and not engine.step().scheduled:
                break
            if coming:
                engine.step()
        engine.snapshot()  # leaves the last state on the tape
        return tape.recording()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo on the default model and write its recording.")
    parser.add_argument(
        "path", nargs="?", type=Path, default=DEMO, help="where to write it (default: into the package)"
    )
    path = record().save(parser.parse_args().path)
    print(f"{path}: {Recording.load(path)}, {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
