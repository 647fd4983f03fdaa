"""OpenVINO GenAI: its continuous batching pipeline, stepped from outside. The model is exported once, with optimum-intel."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from open_loop import open_loop

GIB = 2**30


class Peer:
    def __init__(
        self, *, model, dtype, quantization, threads, cache_tokens, cache_bytes, max_num_seqs, max_model_len, folder
    ):
        precision = {"bfloat16": openvino.Type.bf16, "float32": openvino.Type.f32}[dtype]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = -(-cache_bytes // GIB)
        scheduler.max_num_seqs = max_num_seqs
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(exported(Path(model), quantization, Path(folder))),
            scheduler,
            "CPU",
            {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"},
        )
        self.last_id = 0
        self.about = (
            f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}, {quantization or 'full'} weights, inference in {dtype}, KV in its default type, "
            f"{threads} threads, latency hint, ContinuousBatchingPipeline with {scheduler.cache_size} GiB of cache, at most "
            f"{scheduler.max_num_seqs} sequences and {scheduler.max_num_batched_tokens} tokens a step, no prefix cache"
        )

    def generate(self, prompts, new_tokens):
        handles = [self._submit(prompt, new_tokens) for prompt in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [handle.read_all()[0].generated_ids for handle in handles]

    def serve(self, jobs):
        handles = {}

        def submit(i, prompt, new_tokens):
            handles[i] = self._submit(prompt, new_tokens)

        def step():
            self.pipeline.step()
            came = {}
            for i, handle in list(handles.items()):
                count = 0
                while handle.can_read():
                    count += sum(len(output.generated_ids) for output in handle.read().values())
                is_over = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
                if is_over:
                    del handles[i]
                if count or is_over:
                    came[i] = count, is_over
            return came

        return open_loop(jobs, submit, step)

    def _submit(self, prompt, new_tokens):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        self.last_id += 1
        return self.pipeline.add_request(self.last_id, openvino.Tensor(np.array([prompt], np.int64)), config)


def exported(model, quantization, folder):
    """The model as OpenVINO reads it, exported into `folder` unless it is there from an earlier run."""
    stat = next(model.glob("*.safetensors")).stat()
    key = hashlib.sha256(f"{model.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = folder / f"openvino-{key}-{quantization or 'full'}"
    if target.exists():
        return target
    from optimum.intel.openvino.modeling_decoder import OVModelForCausalLM  # brings torch and nncf along

    making = target.with_name(f".{target.name}-{os.getpid()}")
    loaded = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=quantization == "int8")
    loaded.save_pretrained(making)
    shutil.copy(model / "config.json", making)
    making.replace(target)
    return target
