"""Others on the same model and the same token ids. A peer gives `generate(prompts, new_tokens)` and nothing else."""

from __future__ import annotations

import torch

from ..models.hub import resolve


class Transformers:
    """`transformers.generate`, static batching, greedy, with its own default attention."""

    name = "transformers"

    def __init__(self, model: str, dtype: torch.dtype):
        from transformers import AutoModelForCausalLM

        folder = resolve(model, progress=False).folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """`prompts` have one length; exactly `new_tokens` ids come back for each."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()


class Kvscope:
    """Our engine through its public API, prefix caching off so that no prompt is skipped."""

    name = "kvscope"

    def __init__(self, model: str, dtype: str, **options):
        from ..engine import Engine

        self.engine = Engine(model, dtype=dtype, enable_prefix_caching=False, **options)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        from ..sampling.params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self.engine.generate(prompts, params)]

    def close(self) -> None:
        self.engine.close()
