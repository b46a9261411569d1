"""What users read when something is wrong: sentences, everywhere; the texts themselves are tested beside what raises them."""

import ast
from pathlib import Path

import pytest
import torch

import squisher
import squisher.errors

PACKAGE = Path(__file__).parents[1] / "src" / "squisher"
OURS = {name for name in squisher.errors.__all__ if name.endswith(("Error", "Warning"))}
FILES = sorted(PACKAGE.rglob("*.py"))


def text_of(node):
    """The constant words of a message, wherever they stand in the expression."""
    return " ".join(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def wordless(tree):
    """Raised errors of ours that have no words, and what is not an error that a user could understand."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.lineno, "assert"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "print":
                found.append((node.lineno, "print"))
            # Put together from other sentences: a variable, or a string of several of them.
            parts = [n for n in ast.walk(node) if isinstance(n, ast.FormattedValue)]
            computed = len(parts) > 1 or bool(node.args and not isinstance(node.args[0], (ast.Constant, ast.JoinedStr)))
            if node.func.id in OURS and not computed and len(text_of(node).split()) < 4:
                found.append((node.lineno, node.func.id))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in OURS:
            found.append((node.lineno, "raise without a message"))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_error_has_words_and_nothing_prints_or_asserts(file):
    assert not wordless(ast.parse(file.read_text()))


@pytest.mark.parametrize(
    "code", ["raise SquisherError", "raise FileError('bad')", "assert x", "print(1)", "raise NamingError(f'{x}')"]
)
def test_that_test_can_fail(code):
    assert wordless(ast.parse(code))


def test_every_error_is_a_squisher_error():
    for name in OURS:
        kind = getattr(squisher.errors, name)
        assert issubclass(kind, squisher.SquisherError | squisher.SquisherWarning)


def test_near_names_are_suggested_only_if_near():
    assert squisher.errors.near("wieght", ["weight", "bias"]) == " Did you mean 'weight'?"
    assert squisher.errors.near("zzz", ["weight", "bias"]) == ""


WEIGHTS = {"a.weight": torch.ones(4, 8)}


@pytest.mark.parametrize(
    ("call", "noun"),
    [
        (lambda: squisher.merge.average(None), "models"),
        (lambda: squisher.merge.fisher([WEIGHTS, WEIGHTS], None), "importances"),
        (lambda: squisher.merge.task_arithmetic(None, [WEIGHTS]), "base"),
        (lambda: squisher.merge.ota(WEIGHTS, [WEIGHTS], [WEIGHTS], keep=["half"]), "half"),
        (lambda: squisher.prune.weights(WEIGHTS, WEIGHTS, sparsity="half"), "sparsity"),
        (lambda: squisher.prune.weights(WEIGHTS, WEIGHTS, nm=2), "pattern"),
        (lambda: squisher.mask.top_k(WEIGHTS, keep="half"), "keep"),
        (lambda: squisher.mask.top_k([WEIGHTS], keep=0.5), "importance"),
        (lambda: squisher.quantize.sensitivity(WEIGHTS, WEIGHTS, bits=4), "bits"),
        (lambda: squisher.EWC(None), "Module"),
    ],
)
def test_an_argument_of_the_wrong_type_is_one_sentence(call, noun):
    with pytest.raises(squisher.SquisherError, match=noun):
        call()


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_message_for_both_worlds_names_the_python_argument_alone(file):
    """A command shows the messages of the functions that it calls, and its user types --exclude; EWC has no command."""
    calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    said = [text_of(n) for n in calls if ast.unparse(n.func) in OURS | {"warnings.warn"}]
    assert not [text for text in said if "exclude=" in text and "EWC(" not in text and "['policy" not in text]
