"""A peer in an interpreter of another environment, asked over its stdin and stdout (`peer_adapters/child.py` is the protocol).

While it is not its turn the process is stopped (where the system can do that), so that threads which spin for their next
work take nothing from whoever is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..engine import Engine
from ..models.cache import models_folder
from ..models.hub import resolve
from .contender import Arrival, Generated

ADAPTERS = Path(__file__).parent / "peer_adapters"
SECONDS = 1800.0  # the longest that an answer may take: loading exports and compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a peer is told when it loads; `child.py` says what each means."""

    model: str
    dtype: str
    quantization: str | None
    threads: int
    cache_tokens: int
    cache_bytes: int
    max_num_seqs: int
    max_model_len: int
    folder: str

    @classmethod
    def like(cls, engine: Engine) -> Settings:
        """The same model, type, threads and sizes as `engine`; what a peer makes is kept beside the models."""
        config, info = engine.config, engine.info
        folder = models_folder().parent / "peers"
        folder.mkdir(parents=True, exist_ok=True)
        return cls(
            model=str(resolve(config.model).folder), dtype=info.dtype,
            quantization="int8" if config.quantization else None, threads=info.num_threads,
            cache_tokens=info.num_blocks * info.block_size, cache_bytes=info.pool_bytes,
            max_num_seqs=config.max_num_seqs, max_model_len=info.max_model_len, folder=str(folder),
        )  # fmt: skip


class PeerFailed(RuntimeError):
    """The peer died, was too slow, refused, or did other work than it was asked for; the sentence says which."""


class PeerProcess:
    """`name` (one of `bench.PEERS`) in `python`; `script` starts it. Raises PeerFailed when it does not load."""

    def __init__(
        self,
        name: str,
        python: str,
        settings: Settings,
        *,
        script: Path = ADAPTERS / "child.py",
        seconds: float = SECONDS,
    ):
        self.name = name
        self._seconds = seconds
        self._is_overdue = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (until close)
        try:
            self._process = subprocess.Popen(
                [python, str(script), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=_environment(python, settings.threads),
                **({"process_group": 0} if os.name == "posix" else {}),
            )
        except OSError as error:
            raise PeerFailed(f"{name} could not be started with {python}: {error.strerror}") from error
        try:
            self.about: str = self._ask("load", **asdict(settings))["about"]
        except PeerFailed:
            self.close()
            raise

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Generated:
        """Greedy, exactly `new_tokens` ids for each prompt; the seconds are the peer's own. Raises PeerFailed."""
        answer = self._ask("generate", prompts=list(prompts), new_tokens=new_tokens)
        counts = [len(ids) for ids in answer["tokens"]]
        self._require(counts, [new_tokens] * len(prompts))
        return Generated(answer["tokens"], answer["seconds"])

    def serve(self, arrivals: Sequence[Arrival]) -> list[list[float]]:
        """When each token of each arrival came, in seconds from the start. Raises PeerFailed."""
        times = self._ask("serve", jobs=[list(arrival) for arrival in arrivals])["times"]
        self._require([len(each) for each in times], [arrival.num_new for arrival in arrivals])
        return times

    def close(self) -> None:
        self._signal("SIGCONT")
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._signal("SIGKILL")
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        self._signal("SIGCONT")
        overdue = threading.Timer(self._seconds, self._give_up)
        overdue.start()
        try:
            print(json.dumps({"do": do, **request}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            overdue.cancel()
        if not line:
            raise PeerFailed(self._how_it_ended(do))
        self._signal("SIGSTOP")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerFailed(f"{self.name} should {do} and answered {line.strip()[:80]!r}, which is no JSON") from error
        if "error" in answer:
            raise PeerFailed(f"{self.name} could not {do}: {answer['error']}")
        return answer

    def _require(self, counts: list[int], wanted: list[int]) -> None:
        if counts != wanted:
            raise PeerFailed(
                f"{self.name} gave {sum(counts)} tokens for {len(counts)} prompts where {sum(wanted)} for {len(wanted)} were "
                f"asked for, so a ratio would be false"
            )

    def _how_it_ended(self, do: str) -> str:
        status = self._process.wait()
        if self._is_overdue:
            return f"{self.name} should {do} and gave no answer within {self._seconds:.0f} s, so it was ended"
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        last = f"; its last words: {said[-1][:200]}" if said else ""
        return f"{self.name} ended with status {status} while it should {do}{last}"

    def _give_up(self) -> None:
        self._is_overdue = True
        self._signal("SIGKILL")

    def _signal(self, name: str) -> None:
        """To its whole group, its workers included. Windows can only kill, and only the process itself."""
        if self._process.poll() is not None:
            return
        if os.name == "posix":
            os.killpg(self._process.pid, getattr(signal, name))
        elif name == "SIGKILL":
            self._process.kill()


def transformers_like(engine: Engine) -> PeerProcess:
    """transformers in this environment, on the model of `engine` and its dtype; it has no int8 for the CPU."""
    return PeerProcess("transformers", sys.executable, replace(Settings.like(engine), quantization=None))


def _environment(python: str, threads: int) -> dict[str, str]:
    """So many threads, which soon sleep when they have nothing to do; nothing is looked for on the network. An OpenMP that the
    peer's environment brings along goes before the one of torch, as vLLM's manual asks for; 5 ms of waiting are its own too."""
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "OMP_WAIT_POLICY"
    }
    own_openmp = Path(python).parent.parent / "lib/libiomp5.so"
    preload = {"LD_PRELOAD": str(own_openmp.absolute())} if own_openmp.exists() else {}
    return ours | preload | {"OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "5", "HF_HUB_OFFLINE": "1"}
