"""What a fork server imports and computes once for all of its children, when it imports this module."""

from ringmaster.compat.transformers import fill_caches, import_models

import_models()
fill_caches()
