"""Questions as choices: every task has them, ROPES between two answers of one situation."""

from __future__ import annotations

from experiments.questions import as_choices, is_choice, prompt


def rope(situation, answer):
    return {"background": "b", "situation": situation, "question": f"q {answer}", "answer": answer, "label": None}


def test_ropes_is_a_choice_between_two_answers_about_one_situation():
    rows = [rope("x", "cup A"), rope("x", "cup B"), rope("y", "more"), rope("y", "More"), rope("x", "cup A")]
    assert is_choice(rows)
    found = as_choices("ropes", rows)
    assert len(found) == 3  # the two of y have the same answer
    for row, answer in zip(found, ("cup A", "cup B", "cup A"), strict=True):
        assert row["choices"][row["label"]] == answer
        assert set(row["choices"]) == {"cup A", "cup B"}
    many = as_choices("ropes", [rope("x", str(k % 2)) for k in range(200)])
    assert 70 < sum(row["label"] for row in many) < 130  # the place tells nothing


def test_pairs_are_answered_by_no_and_yes():
    rows = [{"text_a": "one", "text_b": "two", "label": 1}]
    assert not is_choice(rows)
    (row,) = as_choices("paws", rows)
    assert (row["context"], row["choices"], row["label"]) == ("one\ntwo", ["no", "yes"], 1)
    assert row["question"] != as_choices("wiki_qa", rows)[0]["question"]


def test_a_prompt_has_a_letter_for_every_choice_behind_the_context():
    context, rest = prompt({"context": "c", "question": "q?", "choices": ["x", "y"], "label": 0})
    assert context == "c"
    assert rest == "\nq?\nA. x\nB. y\nAnswer:"
