"""transformers: `generate` on static batches; for jobs that come one by one, its own continuous batching."""

import time

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE = 256  # tokens, transformers' own
BUDGET = 512  # tokens a step


class Peer:
    def __init__(
        self, *, model, dtype, quantization, threads, cache_tokens, cache_bytes, max_num_seqs, max_model_len, folder
    ):
        if quantization:
            raise ValueError(f"quantization={quantization!r}: transformers has none for the CPU")
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.num_blocks = cache_tokens // PAGE + max_num_seqs
        self.about = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, {dtype}, {threads} threads, generate with "
            f"{self.model.config._attn_implementation} attention; jobs that come one by one: continuous batching, "
            f"{self.num_blocks} pages of {PAGE} tokens, {BUDGET} tokens a step"
        )

    def generate(self, prompts, new_tokens):
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    def serve(self, jobs):
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        sizes = ContinuousBatchingConfig(
            num_blocks=self.num_blocks, max_batch_tokens=BUDGET
        )  # default: nearly all memory
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=sizes
        ) as manager:
            start = time.perf_counter()
            for i, (at, prompt, new_tokens) in enumerate(jobs):
                time.sleep(max(0.0, start + at - time.perf_counter()))
                manager.add_request(
                    prompt, request_id=str(i), max_new_tokens=new_tokens, record_timestamps=True, eos_token_id=-1
                )
            times = {}
            while len(times) < len(jobs):
                output = manager.get_result(timeout=60)
                if output is None or output.error:
                    raise RuntimeError(f"continuous batching gave {output and output.error}")
                times[int(output.request_id)] = [moment - start for moment in output.timestamps]
        return [times[i] for i in range(len(jobs))]
