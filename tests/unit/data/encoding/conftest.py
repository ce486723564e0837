import pytest
from transformers.models.canine import tokenization_canine


@pytest.fixture(scope="session", autouse=True)
def a_small_vocabulary_of_characters():
    """Each of Canine's tokenizers makes a dictionary of all 1.1 million characters, several times.

    Those up to U+FFFF, where its special tokens are too, suffice for the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization_canine, "UNICODE_VOCAB_SIZE", 0x10000)
        yield
