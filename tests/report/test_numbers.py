from __future__ import annotations

import math

import pytest

from squisher.report.drawing import fixed, formatted, number, power_of_ten, share, whole


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1"), (1.5, "1.5"), (12.345, "12.3"), (123.4, "123"), (1234.5, "1,230"), (99999.0, "100,000"),
        (1e6, "1e6"), (123456789.0, "1.23e8"), (0.00012345, "0.000123"), (0.000099949, "9.99e-5"), (0.00009996, "0.0001"),
        (5.11e-7, "5.11e-7"), (2e-38, "2e-38"), (1e-45, "1e-45"), (-0.5, "-0.5"), (-1234.5, "-1,230"), (1.125, "1.13"),
        (None, "–"), (math.nan, "–"), (math.inf, "–"),
    ],
)  # fmt: skip
def test_three_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0%"), (1.0, "100%"), (0.5, "50%"), (0.12345, "12.3%"), (0.9994, "99.9%"), (0.99980395, "99.980%"),
     (0.9999999, ">99.999%"), (1e-9, "<0.0001%"), (0.0001, "0.01%"), (None, "–")],
)  # fmt: skip
def test_shares_are_never_whole_or_nothing_unless_they_are(value, text):
    assert share(value) == text


def test_other_numbers():
    assert [fixed(x) for x in (0.0625, -0.0001, 1.0, None, -0.5)] == ["0.063", "0.000", "1.000", "–", "-0.500"]
    assert [whole(x) for x in (1234567, 0, None)] == ["1,234,567", "0", "–"]
    assert [power_of_ten(x) for x in (-7, 0, 12)] == ["10⁻⁷", "1", "10¹²"]
    assert [formatted(v, k) for v, k in ((None, "text"), ("a", "text"), (3, "whole"), (0.5, "fixed"))] == [
        "",
        "a",
        "3",
        "0.500",
    ]
