"""What data of speech is known by."""

from ringmaster.techniques.model_facts import CTC_SUFFIX

INFERRED_KINDS = (("speech-text", (CTC_SUFFIX, "WhisperForConditionalGeneration")),)
