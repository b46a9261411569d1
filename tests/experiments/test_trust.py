import json
import re

import pytest

from experiments import examples, pages, quality, trust
from experiments.page_parts import Parts, fill

VALUES = {"spearman": 0.9, "per_tensor": 0.8, "scale": 2.0, "median_ratio": 1.5, "top_1": 0.5, "top_10": 0.7}
PAGE = (pages.DOCS / "when-to-trust-it.md").read_text()


def made(scale, tracker):
    agreement = {**VALUES, "scale": scale}
    names = ["live", "initial", "empirical", "frozen", "clean", "other", *(["tracker"] if tracker else [])]
    against = {name: agreement for name in names}
    moment = {
        "train_accuracy": 99.0, "predicted_scale": 1.1, "squisher": {"exact": agreement, "empirical": agreement},
    }  # fmt: skip
    return {
        "snapshots": [{"step": 100, **moment}, {"step": 200, **moment}],
        "against_exact": against,
        "against_empirical": against,
        "links": {link: agreement for link in trust.CAUSES},
    }


def filled(results, page=PAGE):
    others = examples.numbers(pages.RESULTS, pages.DOCS).words  # of the page's other section
    blocks = {name: make(results) for name, make in trust.BLOCKS.items()}
    return fill(page, Parts(blocks, {**others, **trust.words(results)}))


@pytest.fixture
def results():
    config = {key: value for key, value in quality.CONFIGS["cpu"].items() if key != "seeds"}
    units = {
        f"seed-{seed}/{network}/{variant}": {"result": made(scale, "clip" in variant or "L2" in variant)}
        for seed, scale in ((1, 1.0), (2, 4.0))
        for network, variants in config["variants"].items()
        for variant in variants
    }
    return trust.Results(json.loads(json.dumps({"config": config, "seeds": 2, "units": units})))


def test_ratios_are_averaged_geometrically_and_the_rest_plainly(results):
    assert results.mean("mlp", "base", "against_exact", "live", "scale") == pytest.approx(2.0)
    results.by["mlp", "base"][0]["against_exact"]["live"]["spearman"] = 0.5
    assert results.mean("mlp", "base", "against_exact", "live", "spearman") == pytest.approx(0.7)


def test_every_mark_of_the_page_is_filled(results):
    page = filled(results)
    for name in trust.BLOCKS:
        assert re.search(rf"<!-- {name} -->\n\S.*?\n<!-- end -->", page, re.DOTALL), name
    assert len(re.findall(r"<!--=.+?-->[^–<]+<!---->", page.replace("1.00–4.00", "1.00 to 4.00"))) > 20
    assert "| perceptron: base | ×2.00 (0.90) | ×2.00 (0.90) |" in page


def test_filling_twice_changes_nothing(results):
    once = filled(results)
    assert filled(results, once) == once


def test_only_runs_with_several_snapshots_are_shown_along_training(results):
    for result in results.by["mlp", "base"]:
        del result["snapshots"][0]
    assert "perceptron: base |" not in trust.along(results)
    assert "| perceptron: long | 100 |" in trust.along(results)
