"""Question answering as a choice: rows of text tasks as {context, question, choices, label}, and as a prompt with letters.

Most of the tasks have their choices. ROPES asks for an answer in words; here it is a choice between that answer and another one that is given
to a question about the same situation, which is another and easier task. Pairs of texts become "no" or "yes".
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

__all__ = ["LETTERS", "as_choices", "is_choice", "prompt"]

LETTERS = "ABCDEFGH"
PAIRS = {
    "paws": "Do the two sentences mean the same?",
    "wiki_qa": "Does the second text answer the question?",
}
"""What is asked of a pair of texts."""


def is_choice(rows: list[dict[str, Any]]) -> bool:
    """Return whether rows have choices, or can get some."""
    return "choices" in rows[0] or "situation" in rows[0]


def as_choices(task: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every row with a context, a question, choices and the place of the right one, without rows that have no choice."""
    if "choices" in rows[0]:
        return rows
    if "situation" in rows[0]:
        return _between_two(rows)
    question = PAIRS.get(task, "Is that so?")
    return [
        {
            "context": "\n".join(row[key] for key in ("text_a", "text_b") if key in row),
            "question": question,
            "choices": ["no", "yes"],
            "label": int(row["label"]),
        }
        for row in rows
    ]


def _between_two(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answer and the next different one to a question about the same situation, in a random order drawn once."""
    answers = defaultdict(list)
    for row in rows:
        answers[row["situation"]].append(row["answer"])
    seen: dict[str, int] = defaultdict(int)
    draw = random.Random(0)
    out = []
    for row in rows:
        given = answers[row["situation"]]
        place = seen[row["situation"]]
        seen[row["situation"]] += 1
        later = given[place + 1 :] + given[:place]
        other = next((answer for answer in later if answer.casefold() != row["answer"].casefold()), None)
        if other is None:
            continue
        label = draw.randrange(2)
        choices = [other, row["answer"]] if label else [row["answer"], other]
        context = f"{row['situation']} {row['background']}"  # the situation first: texts are cut at their end
        out.append({"context": context, "question": row["question"], "choices": choices, "label": label})
    return out


def prompt(row: dict[str, Any]) -> tuple[str, str]:
    """Return a row of choices as text: the context, which may be truncated, and the rest, which may not."""
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False))
    return row["context"], f"\n{row['question']}\n{choices}\nAnswer:"
