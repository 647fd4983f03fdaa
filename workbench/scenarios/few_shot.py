"""Few-shot questions: the same solved examples before every new one."""

from .turns import Scenario, turns

_EXAMPLES = """Name the feeling in one word.
Text: The train was late again and nobody said why. Feeling: annoyed
Text: She found the letter that she had lost in spring. Feeling: glad
Text: There was a noise in the empty house. Feeling: afraid
Text: They won in the last minute of the match. Feeling: proud
Text: The dog waited at the door until it was dark. Feeling: sad
Text: """

SCENARIO = Scenario(
    "Six questions with the same examples",
    "Only the last line of each prompt is new: the prefix cache answers for the rest, in blocks of 16 tokens.",
    turns(
        [
            f"{_EXAMPLES}{text} Feeling:"
            for text in (
                "The cake fell on the floor before the guests came.", "Nobody had remembered his birthday.",
                "The doctor said that all was well.", "He had said the wrong name aloud.",
                "The stars came out one after the other.", "Her seat was taken when she came back.",
            )
        ],
        max_tokens=8,
        temperature=0.0,
    ),
)  # fmt: skip
