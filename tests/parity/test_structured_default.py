"""The default model follows a schema, a pattern and a choice at temperature 1, whatever the seed."""

import json
import re

from kvscope.engine import Engine, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CHOICES = ["yes", "no", "perhaps"]
PATTERN = r"[A-Z][a-z]{1,9}, [0-9]{1,3}"


def test_every_output_parses_for_20_seeds():
    wanted = {
        StructuredOutputsParams(json=SCHEMA): lambda text: json.loads(text)["city"] in ("Paris", "Rome"),
        StructuredOutputsParams(choice=CHOICES): CHOICES.__contains__,
        StructuredOutputsParams(regex=PATTERN): re.compile(PATTERN).fullmatch,
    }
    with Engine("default", dtype="float32") as engine:
        for structure, fits in wanted.items():
            params = [SamplingParams(seed=s, max_tokens=80, structured_outputs=structure) for s in range(20)]
            texts = [output.outputs[0].text for output in engine.generate(["A person: "] * 20, params)]
            assert all(map(fits, texts)) and len(set(texts)) > 1
