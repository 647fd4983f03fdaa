"""`PYTHON child.py NAME`: a peer in a process of its own, which answers one JSON object a line on stdin with one on stdout.

| request | answer |
|---|---|
| {"do": "load", model, dtype, quantization, threads, cache_tokens, cache_bytes, max_num_seqs, max_model_len, folder} | {"about": how it was configured, in words} |
| {"do": "generate", "prompts": [[token ids]], "new_tokens": n} | {"seconds": s, "tokens": [[n token ids]]} |
| {"do": "serve", "jobs": [[seconds, [token ids], n]]} | {"times": [[n seconds]]}: when each token came, from the start |

`model` is a folder as the Hugging Face hub lays it out; `quantization` null or "int8"; `cache_tokens` and
`cache_bytes` how much KV cache it will need in that dtype; `folder` where it may keep files that it makes. Prompts are of one length, outputs have exactly the
length asked for, greedy. A fault is answered with {"error": a sentence}. Ends with its stdin. Standard library only.
"""

import importlib
import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up among the answers
    module = importlib.import_module(sys.argv[1].replace(".", "_") + "_peer")
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "load":
                peer = module.Peer(**request)
                answer = {"about": peer.about}
            elif do == "generate":
                start = time.perf_counter()
                tokens = peer.generate(request["prompts"], request["new_tokens"])
                answer = {"seconds": time.perf_counter() - start, "tokens": [list(map(int, ids)) for ids in tokens]}
            else:
                answer = {"times": peer.serve(request["jobs"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
