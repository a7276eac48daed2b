"""The worked example of CONTRIBUTING.md runs, and is as lossless as every drafter."""

import re
from pathlib import Path

import pytest

from dspark.engine import bind
from dspark.pipeline import chain
from dspark.stages.accept import Greedy
from dspark.stages.prefill import Prefill
from dspark.stages.registry import KINDS
from dspark.stages.rollback import Checkpoint, KvTrim
from dspark.stages.verify import Verify
from tests.fakes import HashTarget, ScriptTarget, plain

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)


@pytest.fixture
def example():
    """What the document's Python blocks define."""
    names: dict = {"__name__": "contributing"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    yield names
    del KINDS["draft"]["bigram"]


def answer(target, draft, rollback, length):
    with bind(chain(Prefill(chunk=4), draft, Verify(), Greedy(), rollback, cap=4), target).open(
        PROMPT, max_tokens=length, seed=1
    ) as session:
        return [token for commit in session for token in commit.tokens], session.result


@pytest.mark.parametrize("rollback", [KvTrim(), Checkpoint()])
def test_its_drafter_changes_no_token(example, rollback):
    tokens, _ = answer(HashTarget(), example["Bigram"](), rollback, 60)
    assert tokens == plain(HashTarget(), PROMPT, 60)


def test_its_drafter_is_right_where_text_repeats(example):
    cycle = [7, 8, 9, 10, 11] * 20
    tokens, result = answer(ScriptTarget([*PROMPT, *cycle][1:]), example["Bigram"](), KvTrim(), 60)
    assert tokens == cycle[:60]
    assert result.accepted_length > 3
    assert example["pipeline"].draft.branches[1] == example["Bigram"](reach=3)
