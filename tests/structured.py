"""Prompts and schemas for structured output."""

from drumline import Request, SamplingParams
from drumline.model.grammar import JsonSchema

TEXT = {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[A-Za-z ]+$"}
SCHEMAS = {
    "person": {
        "type": "object",
        "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "colours": {
        "type": "array",
        "items": {"enum": ["red", "green", "blue", "yellow"]},
        "minItems": 1,
        "maxItems": 3,
    },
    "verdict": {
        "type": "object",
        "properties": {"good": {"type": "boolean"}, "reason": TEXT},
        "required": ["good", "reason"],
        "additionalProperties": False,
    },
    "machine": {
        "type": "object",
        "properties": {
            "state": {"enum": ["on", "off", "broken"]},
            "speed": {"type": ["integer", "null"], "minimum": 0, "maximum": 999},
            "tags": {"type": "array", "items": TEXT, "maxItems": 2},
        },
        "required": ["state", "speed", "tags"],
        "additionalProperties": False,
    },
    "choice": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"const": "none"}]},
}
_THINGS = (
    "a drum",
    "a spider",
    "the moon",
    "a kettle",
    "a bicycle",
    "rain",
    "a lathe",
    "bread",
    "a lighthouse",
    "chess",
)
_TASKS = (
    "Describe {} as JSON.",
    "What do you know of {}? Answer in JSON.",
    "Fill in the form about {}.",
    "Someone asks about {}. Reply with data only.",
    "Rate {} and give your answer as a JSON document.",
)
PROMPTS = [task.format(thing) for thing in _THINGS for task in _TASKS]
"""Fifty."""


def asking_for(name: str, prompt: str, seed: int) -> Request:
    """A chat prompt whose answer is to fit a schema; half are greedy."""
    sampling = SamplingParams(temperature=0.8 if seed % 2 else 0.0, top_p=0.95, seed=seed)
    return Request(
        messages=[{"role": "user", "content": prompt}],
        max_tokens=120,
        sampling=sampling,
        structured=JsonSchema(json_schema=SCHEMAS[name]),
    )
