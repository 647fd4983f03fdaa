"""vLLM on the CPU, in process and stepped from outside: nothing but its own engine between a prompt and its tokens."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" keeps one CPU of two for its scheduler's process
    "KMP_TPAUSE": "0",  # as its own launcher of workers sets it
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
import vllm
from open_loop import open_loop
from vllm.sampling_params import RequestOutputKind


class Peer:
    def __init__(
        self, *, model, dtype, quantization, threads, cache_tokens, cache_bytes, max_num_seqs, max_model_len, folder
    ):
        if quantization:
            raise ValueError(f"quantization={quantization!r}: vLLM has no int8 weights for the CPU without calibration")
        arguments = vllm.EngineArgs(
            model=model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=cache_bytes,
            disable_log_stats=True,
        )
        self.engine = vllm.LLMEngine.from_engine_args(arguments)
        self.last_id = 0
        config = self.engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        self.about = (
            f"vLLM {vllm.__version__}, torch {torch.__version__}, {dtype}, {torch.get_num_threads()} threads unbound, in process, "
            f"compiled ({config.compilation_config.backend}), {'libiomp5' if 'libiomp5' in os.environ.get('LD_PRELOAD', '') else 'OpenMP of torch'}, "
            f"{cache.num_gpu_blocks} blocks of {cache.block_size} tokens, at most {scheduler.max_num_seqs} sequences and "
            f"{scheduler.max_num_batched_tokens} tokens a step, no prefix cache"
        )

    def generate(self, prompts, new_tokens):
        made = {}
        for prompt in prompts:
            made[self._submit(prompt, new_tokens)] = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                made[output.request_id] += output.outputs[0].token_ids
        return list(made.values())

    def serve(self, jobs):
        job_of = {}

        def submit(i, prompt, new_tokens):
            job_of[self._submit(prompt, new_tokens)] = i

        def step():
            return {
                job_of[output.request_id]: (len(output.outputs[0].token_ids), output.finished)
                for output in self.engine.step()
            }

        return open_loop(jobs, submit, step)

    def _submit(self, prompt, new_tokens):
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.last_id += 1
        self.engine.add_request(str(self.last_id), vllm.TokensPrompt(prompt_token_ids=prompt), params)
        return str(self.last_id)
