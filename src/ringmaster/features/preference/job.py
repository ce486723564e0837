"""What data of preferences is known by, and what its columns mean for other kinds of data."""

from ringmaster.techniques.model_facts import CAUSAL_SUFFIXES

INFERRED_KINDS = (("preference", CAUSAL_SUFFIXES), ("unpaired-preference", CAUSAL_SUFFIXES))
TAG = {
    "kto_tag": (
        "which is not read. To fix: make rows of prompt, completion and label, of kind unpaired-preference, for the "
        "loss kto; or keep the rows whose tag is true, without the column"
    )
}
LABEL = {
    "label": (
        "which may mark completions that are not desirable, and is not read. To fix: set kind to "
        "unpaired-preference, for the loss kto; or keep the rows whose label is true, without the column"
    )
}
CONVERSATIONS = ("chat", "completion", "preference", "image-text")
DECISIVE_COLUMNS = (("completion", LABEL), *((kind, TAG) for kind in CONVERSATIONS))
