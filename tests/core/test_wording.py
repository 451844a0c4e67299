"""Words of messages and reports."""

import pytest

from iobs.core.formats import plural


@pytest.mark.parametrize(("count", "text"), [(0, "0 layers"), (1, "1 layer"), (2000, "2,000 layers")])
def test_a_noun_follows_its_count(count, text):
    assert plural(count, "layer") == text
