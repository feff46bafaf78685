"""nanoGPT's task: the published size, the published split of the text, and windows of a learner's own part."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.quality.nanogpt import SIZES, TEXT_VARIABLE, NanoGpt, load_characters

TEXT = "".join(chr(97 + number % 7) for number in range(900)) + 100 * "z"


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.txt").write_text(TEXT)
    monkeypatch.setenv(TEXT_VARIABLE, str(tmp_path / "small.txt"))


def test_the_published_recipe_has_800_thousand_parameters_and_starts_at_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = NanoGpt(SIZES["nanogpt-0.8M"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 804_096
    tokens = torch.randint(65, (12, 64))
    assert float(model.loss(tokens, tokens.roll(-1, 1)).detach()) == pytest.approx(math.log(65), abs=0.1)


def test_a_prediction_depends_on_no_later_character() -> None:
    model = NanoGpt(SIZES["nanogpt-0.2M"])
    tokens = torch.randint(65, (1, 64))
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 65
    assert torch.equal(model(tokens)[0, :40], model(changed)[0, :40])


def test_learners_have_parts_of_the_first_nine_tenths_and_the_last_tenth_is_held_out() -> None:
    parts = [load_characters("small", (index, 4)) for index in (1, 2, 3, 4)]
    assert [len(part.train) for part in parts] == [225] * 4
    assert all(len(part.held_out) == 100 and len(set(part.held_out)) == 1 for part in parts)
    assert set(parts[0].held_out).isdisjoint(parts[0].train)


def test_of_many_characters_the_rarest_are_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "wide.txt"
    written.write_text("".join(chr(200 + number) * (300 - number) for number in range(100)))
    monkeypatch.setenv(TEXT_VARIABLE, str(written))
    corpus = load_characters("wide", (1, 1))
    assert max(corpus.held_out) == 64
    assert corpus.train[0] == 0  # the most frequent


def test_a_text_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="text=other"):
        load_characters("other", (1, 1))
