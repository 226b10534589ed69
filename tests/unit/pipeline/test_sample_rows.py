"""Which of several answers are kept, and which pairs are made of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ftcli.data.reasoning import Answer
from ftcli.pipeline.sample_rows import LeftOut, ScoredAnswer, Selection, choose_best, choose_pairs


def scored(*scores: float | None, **change: Any) -> list[ScoredAnswer]:
    """Answers that differ, with these scores."""
    return [ScoredAnswer(Answer(f"answer {at}", **change), score) for at, score in enumerate(scores)]


def best(answers: list[ScoredAnswer], *refused: int, **settings: Any) -> tuple[list[int], str]:
    """Places of what is kept, and why nothing was."""
    left = LeftOut()
    found = choose_best(answers, Selection(**settings), lambda at: None if at in refused else at, left)
    assert all(at == form for at, form in found)
    return [at for at, _ in found], "".join(left)


def pairs(answers: list[ScoredAnswer], *refused: int, **settings: Any) -> tuple[list[tuple[int, int]], str]:
    """Places of pairs, and why there are none."""
    left = LeftOut()
    found = choose_pairs(answers, Selection(**settings), lambda at: None if at in refused else at, left)
    return [(chosen, rejected) for (chosen, _), (rejected, _) in found], "".join(left)


def test_the_best_is_kept_and_of_equally_good_ones_the_first() -> None:
    assert best(scored(0.2, 0.9, 0.9, 0.1)) == ([1], "")
    assert best(scored(0.2, 0.9, 0.9, 0.1), count=3) == ([1, 2, 0], "")
    assert best(scored(0.0, 1.0), best=1.0) == ([1], "")
    assert best(scored(0.0, 0.5), best=1.0) == ([], "below the least score")
    assert best(scored(1 / 3 + 1 / 3 + 1 / 3 - 1e-12), best=1.0) == ([0], "")


def test_pairs_are_of_the_best_and_the_worst() -> None:
    assert pairs(scored(0.5, 1.0, 0.0)) == ([(1, 2)], "")
    assert pairs(scored(0.5, 1.0, 0.0, 0.7), count=4) == ([(1, 2), (3, 0)], "")
    assert pairs(scored(1.0, 1.0, 0.0), count=4) == ([(0, 2)], ""), "an answer is in one pair"
    assert pairs(scored(1.0, 1.0)) == ([], "all answers equally good")
    assert pairs(scored(0.4, 0.2), margin=0.3) == ([], "below the least margin")
    assert pairs(scored(0.9, 0.6, 0.5, 0.2), margin=0.3, count=2) == ([(0, 3)], "")
    assert pairs(scored(0.4, 0.2), chosen=0.5) == ([], "below the least score")
    assert pairs(scored(1.0)) == ([], "all answers equally good")


@pytest.mark.parametrize("choose", [best, pairs])
def test_what_has_no_score_or_no_text_is_not_used(choose: Any) -> None:
    assert choose(scored(None, None)) == ([], "no usable answer")
    empty = [ScoredAnswer(Answer(" \n", "It thought."), 1.0), ScoredAnswer(Answer(""), 0.0)]
    assert choose(empty) == ([], "no usable answer")
    assert choose([]) == ([], "no usable answer")


def test_answers_that_only_their_limit_ended() -> None:
    answers = [*scored(1.0, cut=True), *scored(0.0, 0.5, 0.2)[1:]]
    assert best(answers) == ([1], "")
    assert best(answers, truncated="reject") == ([1], "")
    assert best(answers, truncated="keep") == ([0], "")
    answers = [*scored(0.0, cut=True), *scored(0.0, 0.5, 1.0)[1:]]
    assert pairs(answers) == ([(2, 1)], "")
    assert pairs(answers, truncated="reject") == ([(2, 0)], "")
    assert best(scored(1.0, cut=True)) == ([], "no usable answer")


def test_equal_answers_are_one() -> None:
    answers = [ScoredAnswer(Answer(text), score) for text, score in (("7", 1.0), (" 7\n", 1.0), ("8", 0.0), ("8", 0.0))]
    assert best(answers, count=9) == ([0, 2], "")
    assert pairs(answers, count=9) == ([(0, 2)], "")
    thoughts = [ScoredAnswer(Answer("7", "so"), 1.0), ScoredAnswer(Answer("7", "thus"), 1.0)]
    assert best(thoughts, count=9) == ([0, 1], "")


def test_the_next_one_takes_the_place_of_an_answer_that_training_would_refuse() -> None:
    assert best(scored(0.1, 0.9, 0.5), 1) == ([2], "")
    assert best(scored(1.0), 0) == ([], "training would refuse it")
    assert pairs(scored(0.1, 0.9, 0.5, 0.0), 3) == ([(1, 0)], "")
    assert pairs(scored(0.9, 0.1), 1) == ([], "training would refuse it")


def test_every_prompt_gives_rows_or_a_reason() -> None:
    left = LeftOut()
    for scores in ([1.0, 0.0], [0.0, 0.0], [None, None], [0.0, 0.0]):
        choose_pairs(scored(*scores), Selection(), lambda at: at, left)
    assert left == Counter({"all answers equally good": 2, "no usable answer": 1})
