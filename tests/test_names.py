"""The public names are the contract: each is there, and what type checkers read is what Python finds."""

import ast
from pathlib import Path

import pytest

import dspark

SOURCE = Path(dspark.__file__).read_text()


def declared(source):
    """(name, module) of what the block for type checkers imports."""
    tree = ast.parse(source)
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return sorted((n.names[0].asname, n.module) for n in block.body if isinstance(n, ast.ImportFrom))


@pytest.mark.parametrize("name", dspark.__all__)
def test_every_public_name_is_there(name):
    assert getattr(dspark, name) is not None
    assert name in dir(dspark)


def test_type_checkers_read_the_same_names():
    assert declared(SOURCE) == sorted(dspark._HOME_OF.items())


def test_a_name_left_out_is_caught():
    assert declared(SOURCE.replace("    from dspark.pipeline import chain as chain\n", "")) != set(
        dspark._HOME_OF.items()
    )


def test_the_contract_stays_small():
    assert 35 <= len(dspark.__all__) <= 60


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'chian'"):
        _ = dspark.chian
