import json

import pytest
from small_tokenizers import byte_level, unigram, with_bytes, word_piece


@pytest.fixture(params=[byte_level, with_bytes, unigram, word_piece], ids=lambda make: make.__name__)
def document(request):
    """The tokenizer.json of a small tokenizer."""
    return json.loads(request.param().to_str())
